#include "stats.h"

#include "answers.h"

#include <string.h>

void count_group(struct counters *counters, const struct bytes *body)
{
    const char *marker = find_text(body->data, body->length < 4096 ? body->length : 4096, "grp-");
    if (!marker || marker + 8 > body->data + body->length)
        return;
    int group = 0;
    for (int i = 4; i < 8; i++)
        group = group * 10 + (marker[i] - '0');
    if (group >= 0 && group < GROUPS)
        counters->groups[group]++;
}

static double affinity(const struct counters *counters, int backends)
{
    uint64_t total = 0, at_home = 0;
    for (int group = 0; group < GROUPS; group++) {
        uint32_t most = 0;
        for (int backend = 0; backend < backends; backend++) {
            uint32_t count = counters[backend].groups[group];
            total += count;
            most = count > most ? count : most;
        }
        at_home += most;
    }
    return total ? (double)at_home / (double)total : 0;
}

static void field(struct bytes *out, const char *name, uint64_t value)
{
    bytes_format(out, ",\"%s\":%llu", name, (unsigned long long)value);
}

void answer_stats(struct bytes *out, const struct counters *counters, int backends)
{
    struct bytes body = {0};
    bytes_format(&body, "{\"affinity\":%.4f,\"backends\":[", affinity(counters, backends));
    for (int backend = 0; backend < backends; backend++) {
        const struct counters *n = &counters[backend];
        bytes_format(&body, "%s{\"port\":%d", backend ? "," : "", n->port);
        field(&body, "requests", n->requests);
        field(&body, "streams", n->streams);
        field(&body, "events", n->events);
        field(&body, "running", n->running);
        field(&body, "aborted", n->aborted);
        field(&body, "connections", n->connections);
        field(&body, "side_requests", n->side_requests);
        bytes_append(&body, "}", 1);
    }
    bytes_append(&body, "]}", 2);
    answer_json(out, 200, body.data, body.length);
    bytes_free(&body);
}

void reset_counters(struct counters *counters, int backends)
{
    for (int backend = 0; backend < backends; backend++) {
        struct counters fresh = {.port = counters[backend].port, .running = counters[backend].running};
        counters[backend] = fresh;
    }
}
