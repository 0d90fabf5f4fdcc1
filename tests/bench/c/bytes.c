#define _GNU_SOURCE
#include "bytes.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void *reallocate(void *old, size_t size)
{
    void *memory = realloc(old, size);
    if (!memory) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return memory;
}

void *allocate(size_t size)
{
    return memset(reallocate(NULL, size), 0, size);
}

static void reserve(struct bytes *buffer, size_t more)
{
    size_t needed = buffer->length + more;
    if (needed <= buffer->capacity)
        return;
    buffer->capacity = needed < 1024 ? 1024 : needed * 2;
    buffer->data = reallocate(buffer->data, buffer->capacity);
}

void bytes_append(struct bytes *buffer, const void *data, size_t length)
{
    if (length == 0)
        return;
    reserve(buffer, length);
    memcpy(buffer->data + buffer->length, data, length);
    buffer->length += length;
}

void bytes_format(struct bytes *buffer, const char *format, ...)
{
    va_list measure, print;
    va_start(measure, format);
    va_copy(print, measure);
    int length = vsnprintf(NULL, 0, format, measure);
    va_end(measure);
    reserve(buffer, (size_t)length + 1);
    vsnprintf(buffer->data + buffer->length, (size_t)length + 1, format, print);
    va_end(print);
    buffer->length += (size_t)length;
}

void bytes_drop_front(struct bytes *buffer, size_t length)
{
    buffer->length -= length;
    if (buffer->length > 0)
        memmove(buffer->data, buffer->data + length, buffer->length);
}

void bytes_free(struct bytes *buffer)
{
    free(buffer->data);
    *buffer = (struct bytes){0};
}

const char *find_text(const char *data, size_t length, const char *text)
{
    return memmem(data, length, text, strlen(text));
}

long json_number(const struct bytes *body, const char *key)
{
    size_t tail = body->length < 256 ? body->length : 256;
    const char *found = find_text(body->data + body->length - tail, tail, key);
    if (!found)
        found = find_text(body->data, body->length, key);
    if (!found)
        return -1;
    size_t at = (size_t)(found - body->data) + strlen(key);
    while (at < body->length && (body->data[at] == ':' || body->data[at] == ' '))
        at++;
    if (at < body->length && body->data[at] == 't')
        return 1; /* true */
    long value = 0;
    size_t digits = at;
    for (; at < body->length && body->data[at] >= '0' && body->data[at] <= '9'; at++)
        value = value * 10 + (body->data[at] - '0');
    return at > digits ? value : -1;
}

bool digits_after(const char *text, char mark, int count, int64_t *value)
{
    if (*text++ != mark)
        return false;
    *value = 0;
    for (int i = 0; i < count; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        *value = *value * 10 + (text[i] - '0');
    }
    return true;
}
