/* What a vLLM server would say, canned: bodies, metrics, stream events. */
#ifndef BENCH_ANSWERS_H
#define BENCH_ANSWERS_H

#include "bytes.h"
#include "stats.h"

#include <stdint.h>

extern const char STREAM_HEAD[];
extern const char NOT_FOUND[];
extern const char MODELS[];
extern const char VERSION[];
extern const char CHAT_COMPLETION[];
extern const char EMBEDDING[];

void answer_json(struct bytes *out, int status, const char *body, size_t length);
void answer_text(struct bytes *out, const char *body, size_t length);
void answer_metrics(struct bytes *out, const struct counters *counters);

/* Token ids of TEXT, one for each four bytes, as `/tokenize` or `/v1/chat/completions/render` reports them. */
void answer_tokens(struct bytes *out, const char *text, size_t length, const char *field);

/* One chunk with one event. Its content is `t<19 digits>`, the time it was sent; the first event's has `h<12 digits>` after
   that, how long the engine held the request before it. Both in nanoseconds. */
void stream_event(struct bytes *out, int64_t now, int64_t held, int index, int total);
void stream_usage(struct bytes *out, int events);
void stream_end(struct bytes *out);

#endif
