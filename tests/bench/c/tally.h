/* What a load run saw: counts, errors by kind, durations; printed as one JSON line. */
#ifndef BENCH_TALLY_H
#define BENCH_TALLY_H

#include "samples.h"

enum error { STATUS, TRUNCATED, MISCOUNTED, LOST, CONNECT, UNFINISHED, ERROR_KINDS };

struct tally {
    uint64_t requests, events; /* in the window */
    uint64_t refused; /* in the window */
    uint64_t all_requests, reconnects, errors[ERROR_KINDS];
    double seconds, cpu_seconds; /* of the window, and of this process in it */
    double in_flight_seconds;    /* time in the window times the requests in flight */
    struct samples latency, refusal, ttft, ttft_added, gap, relay;
    char first_error[200];
};

void note_error(struct tally *tally, enum error kind, const char *detail, size_t length);
uint64_t error_count(const struct tally *tally);
void print_tally(struct tally *tally, int connections);

#endif
