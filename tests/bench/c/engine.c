/* A mock of several vLLM servers in one process, one for each port; one thread, no waiting but in epoll.

   usage: engine PORT [PORT...]      (0 = a free port; prints "listening PORT PORT..." when it is ready)

   POST /v1/chat/completions, /v1/completions
       "stream": true   "max_tokens" events (default 100), one send each. With "seed": N they come N ms apart, the first after
                        N ms, too (its prefill); else as fast as the client takes them, one event a stream in turn.
                        `seed` carries the pace because proxies that rewrite bodies keep the fields of OpenAI's schema only.
       otherwise: one canned answer
   POST /v1/embeddings, /tokenize, /v1/chat/completions/render    canned; ids for each four bytes of the body
   GET /health, /v1/models, /version, /metrics                    as vLLM has them
   GET /stats, POST /reset    what arrived where, and the affinity: the share of requests that came to the backend that has
                              most of their group (`grp-NNNN` near the start of the body) */
#define _GNU_SOURCE
#include "alarms.h"
#include "answers.h"
#include "bytes.h"
#include "message.h"
#include "stats.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { TURN_EVENTS = 512, SLOW_READER_BYTES = 65536 };

/* What epoll hands back: a listening socket, or the start of a connection. */
struct source {
    int fd;
    int backend;
    bool listens;
};

struct connection {
    struct source source;
    bool waits_for_room, closes, closed;
    struct message request;
    struct bytes body;
    struct bytes early; /* what the client sent after the request that is being streamed */
    struct bytes out;
    bool streams, wants_usage;
    int events, events_sent;
    int64_t interval, asked_at;
    struct alarm alarm;
    struct connection *previous, *next; /* among the unpaced streams, or (next) among the closed */
};

static int poller, backend_count;
static struct source listeners[MAX_BACKENDS];
static struct counters counters[MAX_BACKENDS];
static struct alarms alarms;
static struct connection *unpaced, *closed;
static bool unpaced_blocked; /* every unpaced stream waits for its reader */

static void watch(struct connection *c, bool room)
{
    if (c->waits_for_room == room)
        return;
    c->waits_for_room = room;
    struct epoll_event event = {.events = EPOLLIN | (room ? EPOLLOUT : 0), .data.ptr = &c->source};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->source.fd, &event);
}

static void stop_stream(struct connection *c)
{
    if (!c->streams)
        return;
    c->streams = false;
    counters[c->source.backend].running--;
    alarms_remove(&alarms, &c->alarm);
    if (c->previous)
        c->previous->next = c->next;
    else if (unpaced == c)
        unpaced = c->next;
    if (c->next)
        c->next->previous = c->previous;
    c->previous = c->next = NULL;
}

/* Memory stays until the end of the turn: later events of the same turn may still point here. */
static void close_connection(struct connection *c)
{
    if (c->closed)
        return;
    if (c->streams)
        counters[c->source.backend].aborted++;
    stop_stream(c);
    close(c->source.fd);
    c->closed = true;
    c->next = closed;
    closed = c;
}

static void free_closed(void)
{
    while (closed) {
        struct connection *c = closed;
        closed = c->next;
        bytes_free(&c->body);
        bytes_free(&c->early);
        bytes_free(&c->out);
        free(c);
    }
}

static void flush(struct connection *c)
{
    while (c->out.length > 0) {
        ssize_t sent = send(c->source.fd, c->out.data, c->out.length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno == EAGAIN) {
            watch(c, true);
            return;
        }
        if (sent < 0) {
            close_connection(c);
            return;
        }
        bytes_drop_front(&c->out, (size_t)sent);
    }
    watch(c, false);
    if (c->closes && !c->streams)
        close_connection(c);
}

static void send_event(struct connection *c)
{
    int64_t now = now_ns();
    stream_event(&c->out, now, now - c->asked_at, c->events_sent, c->events);
    counters[c->source.backend].events++;
    if (++c->events_sent == c->events) {
        if (c->wants_usage)
            stream_usage(&c->out, c->events);
        stream_end(&c->out);
        stop_stream(c);
    }
    flush(c);
}

static void start_stream(struct connection *c)
{
    long events = json_number(&c->body, "\"max_tokens\""), pace_ms = json_number(&c->body, "\"seed\"");
    counters[c->source.backend].streams++;
    counters[c->source.backend].running++;
    c->streams = true;
    c->wants_usage = json_number(&c->body, "\"include_usage\"") > 0;
    c->events = events > 0 ? (int)events : 100;
    c->events_sent = 0;
    c->interval = pace_ms > 0 ? pace_ms * 1000000 : 0;
    c->asked_at = now_ns();
    bytes_append(&c->out, STREAM_HEAD, strlen(STREAM_HEAD));
    if (c->interval) {
        c->alarm.due = c->asked_at + c->interval;
        alarms_add(&alarms, &c->alarm);
        return;
    }
    c->previous = NULL;
    c->next = unpaced;
    if (unpaced)
        unpaced->previous = c;
    unpaced = c;
}

static void answer_completion(struct connection *c)
{
    counters[c->source.backend].requests++;
    count_group(&counters[c->source.backend], &c->body);
    if (json_number(&c->body, "\"stream\"") > 0)
        start_stream(c);
    else
        answer_json(&c->out, 200, CHAT_COMPLETION, strlen(CHAT_COMPLETION));
}

static bool asks(const struct connection *c, const char *method_and_path)
{
    size_t length = strlen(method_and_path);
    char after = c->request.head[length];
    return strncmp(c->request.head, method_and_path, length) == 0 && (after == ' ' || after == '?');
}

static void answer(struct connection *c)
{
    c->closes = c->request.closes;
    if (asks(c, "POST /v1/chat/completions") || asks(c, "POST /v1/completions")) {
        answer_completion(c);
        return;
    }
    counters[c->source.backend].side_requests++;
    if (asks(c, "POST /v1/embeddings"))
        answer_json(&c->out, 200, EMBEDDING, strlen(EMBEDDING));
    else if (asks(c, "POST /v1/chat/completions/render"))
        answer_tokens(&c->out, c->body.data, c->body.length, "token_ids");
    else if (asks(c, "POST /tokenize"))
        answer_tokens(&c->out, c->body.data, c->body.length, "tokens");
    else if (asks(c, "GET /health"))
        answer_json(&c->out, 200, "", 0);
    else if (asks(c, "GET /v1/models"))
        answer_json(&c->out, 200, MODELS, strlen(MODELS));
    else if (asks(c, "GET /version"))
        answer_json(&c->out, 200, VERSION, strlen(VERSION));
    else if (asks(c, "GET /metrics"))
        answer_metrics(&c->out, &counters[c->source.backend]);
    else if (asks(c, "GET /stats"))
        answer_stats(&c->out, counters, backend_count);
    else if (asks(c, "POST /reset")) {
        reset_counters(counters, backend_count);
        answer_json(&c->out, 200, "{}", 2);
    } else
        answer_json(&c->out, 404, NOT_FOUND, strlen(NOT_FOUND));
}

static void keep_body(void *owner, const char *data, size_t length)
{
    bytes_append(&((struct connection *)owner)->body, data, length);
}

static void take(struct connection *c, const char *data, size_t length)
{
    char expect[32];
    while (length > 0 && !c->streams && !c->closes && !c->closed) {
        bool in_head = c->request.state == MESSAGE_HEAD;
        size_t used = message_feed(&c->request, data, length, keep_body, c);
        data += used;
        length -= used;
        if (c->request.state == MESSAGE_BROKEN) {
            close_connection(c);
        } else if (c->request.state == MESSAGE_DONE) {
            answer(c);
            c->body.length = 0;
            message_start(&c->request, MESSAGE_REQUEST);
            flush(c);
        } else if (in_head && c->request.state != MESSAGE_HEAD && length == 0 &&
                   message_header(&c->request, "expect", expect, sizeof expect)) {
            bytes_format(&c->out, "HTTP/1.1 100 Continue\r\n\r\n");
            flush(c);
        }
    }
    if (!c->closed)
        bytes_append(&c->early, data, length);
}

/* Pipelined requests that waited for a stream to end. */
static void take_early(struct connection *c)
{
    while (!c->closed && !c->closes && !c->streams && c->early.length > 0) {
        struct bytes early = c->early;
        c->early = (struct bytes){0};
        take(c, early.data, early.length);
        bytes_free(&early);
    }
}

static void receive(struct connection *c)
{
    static char data[262144];
    ssize_t got = recv(c->source.fd, data, sizeof data, 0);
    if (got > 0)
        take(c, data, (size_t)got);
    else if (got == 0 || (errno != EAGAIN && errno != EINTR))
        close_connection(c);
}

static void accept_all(const struct source *listener)
{
    for (;;) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *c = allocate(sizeof *c);
        c->source = (struct source){.fd = fd, .backend = listener->backend};
        message_start(&c->request, MESSAGE_REQUEST);
        counters[listener->backend].connections++;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &c->source};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static void serve_source(struct source *source, uint32_t events)
{
    if (source->listens) {
        accept_all(source);
        return;
    }
    struct connection *c = (struct connection *)source;
    if (!c->closed && (events & EPOLLOUT))
        flush(c);
    if (!c->closed && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        receive(c);
    take_early(c);
}

static void step_unpaced(void)
{
    unpaced_blocked = true;
    for (struct connection *c = unpaced, *next; c; c = next) {
        next = c->next; /* sending may take this stream out of the list, and only this one */
        if (c->out.length >= SLOW_READER_BYTES)
            continue;
        unpaced_blocked = false;
        send_event(c);
        take_early(c);
    }
}

static void step_paced(void)
{
    for (struct alarm *alarm; (alarm = alarms_first(&alarms)) && alarm->due <= now_ns();) {
        struct connection *c = (struct connection *)((char *)alarm - offsetof(struct connection, alarm));
        alarms_remove(&alarms, alarm);
        int64_t late = now_ns() - alarm->due;
        alarm->due += c->interval + (late > c->interval ? late : 0); /* no burst after a stall */
        alarms_add(&alarms, alarm);
        send_event(c);
        take_early(c);
    }
}

static int timeout_ms(void)
{
    const struct alarm *first = alarms_first(&alarms);
    if (unpaced && !unpaced_blocked)
        return 0;
    if (!first)
        return -1;
    int64_t left = first->due - now_ns();
    return left <= 0 ? 0 : (int)((left + 999999) / 1000000);
}

static void listen_on(int port)
{
    int backend = backend_count++, on = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&address, size) || listen(fd, 4096)) {
        fprintf(stderr, "port %d: %s\n", port, strerror(errno));
        exit(1);
    }
    getsockname(fd, (struct sockaddr *)&address, &size);
    counters[backend].port = ntohs(address.sin_port);
    listeners[backend] = (struct source){.fd = fd, .backend = backend, .listens = true};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &listeners[backend]};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
}

int main(int argc, char **argv)
{
    struct epoll_event events[TURN_EVENTS];
    if (argc < 2 || argc > MAX_BACKENDS + 1) {
        fprintf(stderr, "usage: engine PORT [PORT...]   (at most %d)\n", MAX_BACKENDS);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 1; i < argc; i++)
        listen_on(atoi(argv[i]));
    printf("listening");
    for (int backend = 0; backend < backend_count; backend++)
        printf(" %d", counters[backend].port);
    printf("\n");
    fflush(stdout);
    for (;;) {
        int count = epoll_wait(poller, events, TURN_EVENTS, timeout_ms());
        for (int i = 0; i < count; i++)
            serve_source(events[i].data.ptr, events[i].events);
        step_unpaced();
        step_paced();
        free_closed();
    }
}
