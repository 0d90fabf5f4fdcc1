/* Durations, kept whole until they are sorted for percentiles. */
#ifndef BENCH_SAMPLES_H
#define BENCH_SAMPLES_H

#include <stddef.h>
#include <stdint.h>

struct samples {
    uint32_t *tenths_us; /* up to 429 s */
    size_t count, capacity;
};

void samples_add(struct samples *samples, int64_t ns);

/* `"NAME":{"n":…,"mean":…,"p50":…,…}` in microseconds, to stdout. */
void samples_print(struct samples *samples, const char *name);

#endif
