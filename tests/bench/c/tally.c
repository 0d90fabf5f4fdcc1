#include "tally.h"

#include <stdio.h>

static const char *const error_names[ERROR_KINDS] = {"status", "truncated", "miscounted", "lost", "connect", "unfinished"};

void note_error(struct tally *tally, enum error kind, const char *detail, size_t length)
{
    tally->errors[kind]++;
    if (tally->first_error[0])
        return;
    snprintf(tally->first_error, sizeof tally->first_error, "%s: %.*s", error_names[kind],
             (int)(length < 160 ? length : 160), detail);
    for (char *at = tally->first_error; *at; at++) /* what would break the JSON line */
        if (*at == '"' || *at == '\\' || (unsigned char)*at < 32 || (unsigned char)*at > 126)
            *at = ' ';
}

uint64_t error_count(const struct tally *tally)
{
    uint64_t sum = 0;
    for (int kind = 0; kind < ERROR_KINDS; kind++)
        sum += tally->errors[kind];
    return sum;
}

void print_tally(struct tally *tally, int connections)
{
    double seconds = tally->seconds > 0 ? tally->seconds : 1;
    printf("{\"seconds\":%.4f,\"requests\":%llu,\"events\":%llu,\"requests_per_s\":%.1f,\"events_per_s\":%.1f,", tally->seconds,
           (unsigned long long)tally->requests, (unsigned long long)tally->events, (double)tally->requests / seconds,
           (double)tally->events / seconds);
    printf("\"connections\":%d,\"in_flight\":%.2f,\"cpu_share\":%.3f,\"all_requests\":%llu,\"reconnects\":%llu,\"errors\":{",
           connections, tally->in_flight_seconds / seconds, tally->cpu_seconds / seconds,
           (unsigned long long)tally->all_requests, (unsigned long long)tally->reconnects);
    for (int kind = 0; kind < ERROR_KINDS; kind++)
        printf("%s\"%s\":%llu", kind ? "," : "", error_names[kind], (unsigned long long)tally->errors[kind]);
    printf("},\"first_error\":\"%s\",", tally->first_error);
    samples_print(&tally->latency, "latency_us");
    printf(",\"refused\":%llu,", (unsigned long long)tally->refused);
    samples_print(&tally->refusal, "refusal_us");
    printf(",");
    samples_print(&tally->ttft, "ttft_us");
    printf(",");
    samples_print(&tally->ttft_added, "ttft_added_us");
    printf(",");
    samples_print(&tally->gap, "gap_us");
    printf(",");
    samples_print(&tally->relay, "relay_us");
    printf("}\n");
}
