#include "answers.h"

#include <string.h>

#define EVENT_START \
    "data: {\"id\":\"chatcmpl-5d0c8e7f4b1a4f0b\",\"object\":\"chat.completion.chunk\",\"created\":1764000000,\"model\":\"mock\"," \
    "\"choices\":["

const char STREAM_HEAD[] = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                           "transfer-encoding: chunked\r\n\r\n";
const char NOT_FOUND[] = "{\"detail\":\"Not Found\"}";
const char VERSION[] = "{\"version\":\"0.32.0\"}";
const char MODELS[] = "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1764000000,"
                      "\"owned_by\":\"vllm\",\"root\":\"mock\",\"parent\":null,\"max_model_len\":131072,\"permission\":[]}]}";
const char CHAT_COMPLETION[] =
    "{\"id\":\"chatcmpl-5d0c8e7f4b1a4f0b9c3e2d1a0f9b8c7d\",\"object\":\"chat.completion\",\"created\":1764000000,"
    "\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Prefix caching keeps the "
    "keys and values of tokens that were computed before, so that a prompt that starts alike skips their prefill. A proxy "
    "helps when it sends such prompts to the backend that holds them.\",\"refusal\":null,\"tool_calls\":[]},\"logprobs\":null,"
    "\"finish_reason\":\"stop\",\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":256,\"total_tokens\":300,"
    "\"completion_tokens\":44,\"prompt_tokens_details\":{\"cached_tokens\":128}},\"prompt_logprobs\":null}";
const char EMBEDDING[] =
    "{\"id\":\"embd-5d0c8e7f4b1a4f0b\",\"object\":\"list\",\"created\":1764000000,\"model\":\"mock\",\"data\":[{\"index\":0,"
    "\"object\":\"embedding\",\"embedding\":[0.0127,-0.0341,0.0562,0.0088,-0.0719,0.0253,0.0467,-0.0196]}],"
    "\"usage\":{\"prompt_tokens\":16,\"total_tokens\":16,\"completion_tokens\":0,\"prompt_tokens_details\":null}}";

static void answer(struct bytes *out, int status, const char *type, const char *body, size_t length)
{
    bytes_format(out, "HTTP/1.1 %d %s\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: %s\r\n\r\n", status,
                 status == 200 ? "OK" : "Not Found", length, type);
    bytes_append(out, body, length);
}

void answer_json(struct bytes *out, int status, const char *body, size_t length)
{
    answer(out, status, "application/json", body, length);
}

void answer_text(struct bytes *out, const char *body, size_t length)
{
    answer(out, 200, "text/plain; version=0.0.4; charset=utf-8", body, length);
}

static void metric(struct bytes *out, const char *name, const char *type, double value)
{
    bytes_format(out, "# TYPE vllm:%s %s\nvllm:%s{engine=\"0\",model_name=\"mock\"} %.17g\n", name, type, name, value);
}

void answer_metrics(struct bytes *out, const struct counters *counters)
{
    struct bytes text = {0};
    metric(&text, "num_requests_running", "gauge", (double)counters->running);
    metric(&text, "num_requests_waiting", "gauge", 0);
    metric(&text, "kv_cache_usage_perc", "gauge", 0.1);
    metric(&text, "prefix_cache_queries_total", "counter", 256.0 * (double)counters->requests);
    metric(&text, "prefix_cache_hits_total", "counter", 128.0 * (double)counters->requests);
    metric(&text, "num_preemptions_total", "counter", 0);
    metric(&text, "prompt_tokens_total", "counter", 256.0 * (double)counters->requests);
    metric(&text, "generation_tokens_total", "counter",
           (double)counters->events + 44.0 * (double)(counters->requests - counters->streams));
    bytes_format(&text, "# TYPE vllm:cache_config_info gauge\n"
                        "vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",engine=\"0\","
                        "kv_cache_size_tokens=\"1048576\",num_gpu_blocks=\"65536\"} 1.0\n");
    answer_text(out, text.data, text.length);
    bytes_free(&text);
}

/* Formatting costs a microsecond, this a tenth of it: the engine must stay cheaper than any proxy. */
static void write_digits(char *digits, int count, int64_t value)
{
    while (count-- > 0) {
        digits[count] = (char)('0' + value % 10);
        value /= 10;
    }
}

void answer_tokens(struct bytes *out, const char *text, size_t length, const char *field)
{
    struct bytes body = {0};
    bytes_format(&body, "{\"request_id\":\"chatcmpl-5d0c8e7f\",\"count\":%zu,\"max_model_len\":131072,\"%s\":[", length / 4,
                 field);
    for (size_t at = 0; at + 4 <= length; at += 4) {
        char id[] = "100000,";
        uint32_t word;
        memcpy(&word, text + at, sizeof word);
        write_digits(id + 1, 5, (word * 2654435761u) >> 16);
        bytes_append(&body, id, at + 8 <= length ? 7 : 6);
    }
    bytes_append(&body, "]}", 2);
    answer_json(out, 200, body.data, body.length);
    bytes_free(&body);
}

static void chunk(struct bytes *out, const struct bytes *data)
{
    bytes_format(out, "%zx\r\n", data->length);
    bytes_append(out, data->data, data->length);
    bytes_append(out, "\r\n", 2);
}

enum place { FIRST, MIDDLE, LAST };

/* The bytes of an event with zeros for its times, which are written over them. */
static const struct bytes *event_template(enum place place)
{
    static struct bytes templates[3];
    if (templates[place].length == 0) {
        struct bytes event = {0};
        bytes_format(&event, "%s{\"index\":0,\"delta\":{%s\"content\":\"t%019d%s\"},\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
                     EVENT_START, place == FIRST ? "\"role\":\"assistant\"," : "", 0, place == FIRST ? "h000000000000" : "",
                     place == LAST ? "\"stop\"" : "null");
        chunk(&templates[place], &event);
        bytes_free(&event);
    }
    return &templates[place];
}

void stream_event(struct bytes *out, int64_t now, int64_t held, int index, int total)
{
    const struct bytes *event = event_template(index == 0 ? FIRST : index == total - 1 ? LAST : MIDDLE);
    size_t stamp_at = (size_t)(find_text(event->data, event->length, "\"t0") - event->data) + 2;
    bytes_append(out, event->data, event->length);
    char *stamp = out->data + out->length - event->length + stamp_at;
    write_digits(stamp, 19, now);
    if (index == 0)
        write_digits(stamp + 20, 12, held);
}

void stream_usage(struct bytes *out, int events)
{
    struct bytes event = {0};
    const char *start = EVENT_START;
    bytes_format(&event, "%s],\"usage\":{\"prompt_tokens\":256,\"total_tokens\":%d,\"completion_tokens\":%d}}\n\n", start,
                 256 + events, events);
    chunk(out, &event);
    bytes_free(&event);
}

void stream_end(struct bytes *out)
{
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    bytes_append(out, end, sizeof end - 1);
}
