/* What arrived at each backend, and how well requests of one group stayed together. */
#ifndef BENCH_STATS_H
#define BENCH_STATS_H

#include "bytes.h"

#include <stdint.h>

enum { MAX_BACKENDS = 16, GROUPS = 10000 };

struct counters {
    int port;
    uint64_t running, requests, streams, events, aborted, connections;
    uint64_t side_requests; /* all but chat and text completions */
    uint32_t groups[GROUPS];
};

/* Counts the group that BODY names near its start: `grp-NNNN`. */
void count_group(struct counters *counters, const struct bytes *body);
void answer_stats(struct bytes *out, const struct counters *counters, int backends);
void reset_counters(struct counters *counters, int backends);

#endif
