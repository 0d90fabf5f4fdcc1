/* What the load generator is asked to do, and the requests it sends, ready to go out. */
#ifndef BENCH_OPTIONS_H
#define BENCH_OPTIONS_H

#include "bytes.h"

#include <stdbool.h>

struct options {
    int port, connections, events, pace_ms;
    int refused_pause_ms; /* 0 = a refusal is an error */
    long requests; /* 0 = until the time is over */
    double warmup_seconds, seconds;
    bool stream;
    const char *path, *bodies;
};

struct prepared {
    struct bytes *requests;
    size_t count;
};

/* Both end the program with a word when the command line or the file is of no use. */
struct options read_options(int argc, char **argv);
struct prepared prepare_requests(const struct options *options);

#endif
