/* Where one HTTP/1.1 message ends: its head, then a body by length, by chunks, or until the connection closes. */
#ifndef BENCH_MESSAGE_H
#define BENCH_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>

enum message_kind { MESSAGE_REQUEST, MESSAGE_RESPONSE };

enum message_state {
    MESSAGE_HEAD,
    MESSAGE_LENGTH, /* body bytes counted by content-length */
    MESSAGE_CHUNK_SIZE,
    MESSAGE_CHUNK,
    MESSAGE_CHUNK_END,
    MESSAGE_TRAILER,
    MESSAGE_UNTIL_CLOSE,
    MESSAGE_DONE,
    MESSAGE_BROKEN, /* not HTTP/1.1: give the connection up */
};

struct message {
    enum message_kind kind;
    enum message_state state;
    int status;  /* of a response */
    bool closes; /* the sender closes the connection after this message */
    size_t left; /* of the body, or of the chunk */
    size_t line_length;
    size_t head_length;
    char line[32]; /* a chunk-size line, or the start of a trailer line */
    char head[16384];
};

typedef void body_sink(void *owner, const char *data, size_t length);

void message_start(struct message *message, enum message_kind kind);

/* Takes some of DATA and says how much; call again with the rest until the state is done or broken.
   Returns at the end of the head, too, so that the caller can look at it. Body bytes go to SINK. */
size_t message_feed(struct message *message, const char *data, size_t length, body_sink *sink, void *owner);

/* The value of a header (NUL-terminated, in OUT), or false. Valid after the head. */
bool message_header(const struct message *message, const char *name, char *out, size_t capacity);

#endif
