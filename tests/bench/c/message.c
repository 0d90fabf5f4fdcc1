#define _GNU_SOURCE
#include "message.h"

#include "bytes.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

void message_start(struct message *message, enum message_kind kind)
{
    message->kind = kind;
    message->state = MESSAGE_HEAD;
    message->status = 0;
    message->closes = false;
    message->left = message->line_length = message->head_length = 0;
}

bool message_header(const struct message *message, const char *name, char *out, size_t capacity)
{
    size_t name_length = strlen(name);
    const char *line = message->head, *end = message->head + message->head_length;
    while ((line = memchr(line, '\n', (size_t)(end - line)))) {
        line++;
        if ((size_t)(end - line) <= name_length || strncasecmp(line, name, name_length) || line[name_length] != ':')
            continue;
        const char *value = line + name_length + 1;
        while (*value == ' ' || *value == '\t')
            value++;
        size_t length = strcspn(value, "\r\n");
        if (length >= capacity)
            length = capacity - 1;
        memcpy(out, value, length);
        out[length] = 0;
        return true;
    }
    return false;
}

static bool speaks_http_10(const struct message *message)
{
    size_t first_line = strcspn(message->head, "\r\n");
    size_t version_at = message->kind == MESSAGE_RESPONSE || first_line < 8 ? 0 : first_line - 8;
    return strncmp(message->head + version_at, "HTTP/1.0", 8) == 0;
}

static void begin_body(struct message *message)
{
    char value[64];
    bool response = message->kind == MESSAGE_RESPONSE;
    if (response) {
        message->status = atoi(message->head + strcspn(message->head, " "));
        if (message->status >= 100 && message->status < 200) { /* an interim answer: the real one follows */
            message->head_length = 0;
            return;
        }
    }
    message->closes = speaks_http_10(message);
    if (message_header(message, "connection", value, sizeof value))
        message->closes = strcasecmp(value, "close") == 0;
    if (message_header(message, "transfer-encoding", value, sizeof value) && strcasecmp(value, "chunked") == 0) {
        message->state = MESSAGE_CHUNK_SIZE;
    } else if (message_header(message, "content-length", value, sizeof value)) {
        message->left = strtoul(value, NULL, 10);
        message->state = message->left ? MESSAGE_LENGTH : MESSAGE_DONE;
    } else if (response && message->status != 204 && message->status != 304) {
        message->state = MESSAGE_UNTIL_CLOSE;
        message->closes = true;
    } else {
        message->state = MESSAGE_DONE;
    }
}

static size_t feed_head(struct message *message, const char *data, size_t length)
{
    size_t old = message->head_length, room = sizeof message->head - 1 - old;
    size_t taken = length < room ? length : room;
    memcpy(message->head + old, data, taken);
    message->head_length += taken;
    message->head[message->head_length] = 0;
    size_t from = old > 3 ? old - 3 : 0;
    const char *end = find_text(message->head + from, message->head_length - from, "\r\n\r\n");
    if (!end) {
        if (taken == room)
            message->state = MESSAGE_BROKEN;
        return taken;
    }
    message->head_length = (size_t)(end - message->head) + 4;
    message->head[message->head_length] = 0;
    size_t used = message->head_length - old;
    begin_body(message);
    return used;
}

/* Collects a line; its start stays in message->line. True when the line is complete. */
static bool feed_line(struct message *message, const char *data, size_t length, size_t *used)
{
    for (size_t i = 0; i < length; i++) {
        if (data[i] == '\n') {
            message->line[message->line_length] = 0;
            *used = i + 1;
            return true;
        }
        if (data[i] != '\r' && message->line_length < sizeof message->line - 1)
            message->line[message->line_length++] = data[i];
    }
    *used = length;
    return false;
}

static size_t feed_chunk_size(struct message *message, const char *data, size_t length)
{
    size_t used;
    if (!feed_line(message, data, length, &used))
        return used;
    message->line_length = 0;
    if (!isxdigit((unsigned char)message->line[0])) {
        message->state = MESSAGE_BROKEN;
        return used;
    }
    message->left = strtoul(message->line, NULL, 16);
    message->state = message->left ? MESSAGE_CHUNK : MESSAGE_TRAILER;
    return used;
}

static size_t feed_body(struct message *message, const char *data, size_t length, body_sink *sink, void *owner)
{
    size_t taken = length < message->left ? length : message->left;
    message->left -= taken;
    if (message->left == 0)
        message->state = message->state == MESSAGE_CHUNK ? MESSAGE_CHUNK_END : MESSAGE_DONE;
    sink(owner, data, taken);
    return taken;
}

size_t message_feed(struct message *message, const char *data, size_t length, body_sink *sink, void *owner)
{
    size_t used = 0;
    switch (message->state) {
    case MESSAGE_HEAD:
        return feed_head(message, data, length);
    case MESSAGE_CHUNK_SIZE:
        return feed_chunk_size(message, data, length);
    case MESSAGE_LENGTH:
    case MESSAGE_CHUNK:
        return feed_body(message, data, length, sink, owner);
    case MESSAGE_CHUNK_END:
        if (feed_line(message, data, length, &used)) {
            message->state = message->line_length ? MESSAGE_BROKEN : MESSAGE_CHUNK_SIZE;
            message->line_length = 0;
        }
        return used;
    case MESSAGE_TRAILER:
        if (feed_line(message, data, length, &used)) {
            if (message->line_length == 0)
                message->state = MESSAGE_DONE;
            message->line_length = 0;
        }
        return used;
    case MESSAGE_UNTIL_CLOSE:
        sink(owner, data, length);
        return length;
    case MESSAGE_DONE:
    case MESSAGE_BROKEN:
        break;
    }
    return 0;
}
