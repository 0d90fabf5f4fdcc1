/* The monotonic clock, a growable byte buffer, and what is searched for in bytes. */
#ifndef BENCH_BYTES_H
#define BENCH_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct bytes {
    char *data;
    size_t length, capacity;
};

int64_t now_ns(void);

/* Memory that cannot be had ends the program: a measurement has nothing to fall back to. */
void *allocate(size_t size);
void *reallocate(void *old, size_t size);
void bytes_append(struct bytes *buffer, const void *data, size_t length);
void bytes_format(struct bytes *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));
void bytes_drop_front(struct bytes *buffer, size_t length);
void bytes_free(struct bytes *buffer);

/* The first place of TEXT in DATA, or NULL. */
const char *find_text(const char *data, size_t length, const char *text);

/* The number (true = 1) of a quoted KEY in a JSON body, or -1. Options are short and stand last as a rule, so the end is
   searched first. */
long json_number(const struct bytes *body, const char *key);

/* Reads COUNT digits that follow MARK at TEXT; false when they are not there. */
bool digits_after(const char *text, char mark, int count, int64_t *value);

#endif
