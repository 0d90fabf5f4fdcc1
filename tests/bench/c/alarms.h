/* Alarms ordered by time: a binary heap whose members know their place, so that one can be taken out early. */
#ifndef BENCH_ALARMS_H
#define BENCH_ALARMS_H

#include <stddef.h>
#include <stdint.h>

struct alarm {
    int64_t due;  /* ns of the monotonic clock */
    size_t place; /* in the heap, from 1; 0 = not set */
};

struct alarms {
    struct alarm **heap; /* heap[0] is not used */
    size_t count, capacity;
};

void alarms_add(struct alarms *alarms, struct alarm *alarm);
void alarms_remove(struct alarms *alarms, struct alarm *alarm);
struct alarm *alarms_first(const struct alarms *alarms);

#endif
