/* A closed-loop load generator for one OpenAI-compatible server: N connections, each sends its next request when the answer
   to the last one is complete. One thread, no waiting but in epoll.

   usage: load --port P --bodies FILE [--connections 1] [--warmup 1] [--seconds 3] [--path /v1/chat/completions]
               [--stream] [--events 100] [--pace-ms N] [--requests N] [--refused-pause-ms N]

   FILE has one JSON object a line; they are sent in turn. Connections start spread over the warm-up. What completes between
   warm-up and end is measured; "open" and "shut" on stderr mark that window for whoever measures CPU over it. Then no request
   starts, but those in flight must end well, too: every request that does not is an error of one kind:
       status     not 200                      lost        the connection closed or broke before the end
       truncated  a stream without [DONE]      miscounted  a stream with another number of events than asked for
       connect    no connection                unfinished  no end within 5 s after it was due
   With --refused-pause-ms an answer with 429 is no error but a refusal: counted apart, and that connection rests so long.
   Prints one JSON line. Times in microseconds: latency (request to last byte), refusal (the same of those), ttft (to the first event), ttft_added (ttft less
   the time that the engine held the request, as its first event says), gap (between events), relay (engine's send to here). */
#define _GNU_SOURCE
#include "bytes.h"
#include "message.h"
#include "options.h"
#include "tally.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define NEVER INT64_MAX
enum { TURN_EVENTS = 512, MAX_ERRORS = 1000 };

struct client {
    int fd; /* -1 = not connected */
    bool waits_for_room, busy, connected, done_seen;
    const struct bytes *request;
    size_t sent;
    struct message response;
    struct bytes line; /* an SSE line that has not ended yet */
    int64_t begins_at; /* of one that waits to send its next request, else NEVER */
    int64_t asked_at, last_event_at;
    int events;
};

static struct options options;
static struct prepared prepared;
static struct tally tally;
static struct client *clients;
static int poller;
static size_t next_request;
static int64_t opens_at, shuts_at, gives_up_at;
static int64_t next_begin = NEVER; /* the soonest of the clients' */
static int64_t in_flight_since;    /* when the number in flight last changed */
static long issued, in_flight;

static void begin(struct client *client);

static bool in_window(int64_t now)
{
    return now >= opens_at && now < shuts_at;
}

static void change_in_flight(int by)
{
    int64_t now = now_ns();
    if (in_window(now))
        tally.in_flight_seconds += (double)in_flight * (double)(now - in_flight_since) / 1e9;
    in_flight_since = now;
    in_flight += by;
}

static void watch(struct client *client, bool room)
{
    if (client->waits_for_room == room)
        return;
    client->waits_for_room = room;
    struct epoll_event event = {.events = EPOLLIN | (room ? EPOLLOUT : 0), .data.ptr = client};
    epoll_ctl(poller, EPOLL_CTL_MOD, client->fd, &event);
}

static void connect_client(struct client *client)
{
    int on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)options.port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    client->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (client->fd < 0) {
        perror("socket");
        exit(1);
    }
    setsockopt(client->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    client->connected = false;
    client->waits_for_room = true;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = client};
    epoll_ctl(poller, EPOLL_CTL_ADD, client->fd, &event);
    (void)!connect(client->fd, (struct sockaddr *)&address, sizeof address); /* its failure comes as an event */
}

static void disconnect(struct client *client)
{
    close(client->fd);
    client->fd = -1;
    tally.reconnects++;
}

static void end_request(struct client *client)
{
    client->busy = false;
    change_in_flight(-1);
}

static void begin_at(struct client *client, int64_t time)
{
    client->begins_at = time;
    if (time < next_begin)
        next_begin = time;
}

static void fail(struct client *client, enum error kind, const char *detail, size_t length)
{
    note_error(&tally, kind, detail, length);
    end_request(client);
    disconnect(client);
    begin_at(client, now_ns() + 10000000); /* a server that is down must not make this loop spin */
}

static void refuse(struct client *client, int64_t now)
{
    if (in_window(now)) {
        tally.refused++;
        samples_add(&tally.refusal, now - client->asked_at);
    }
    end_request(client);
    if (client->response.closes)
        disconnect(client);
    begin_at(client, now + (int64_t)options.refused_pause_ms * 1000000);
}

static void complete(struct client *client)
{
    int64_t now = now_ns();
    if (client->response.status == 429 && options.refused_pause_ms) {
        refuse(client, now);
        return;
    }
    if (client->response.status != 200) {
        note_error(&tally, STATUS, client->response.head, strcspn(client->response.head, "\r\n"));
    } else if (options.stream && !client->done_seen) {
        note_error(&tally, TRUNCATED, "no [DONE]", 9);
    } else if (options.stream && client->events != options.events) {
        char detail[64];
        int length = snprintf(detail, sizeof detail, "%d events of %d", client->events, options.events);
        note_error(&tally, MISCOUNTED, detail, (size_t)length);
    } else {
        tally.all_requests++;
        if (in_window(now)) {
            tally.requests++;
            samples_add(&tally.latency, now - client->asked_at);
        }
    }
    end_request(client);
    if (client->response.closes)
        disconnect(client);
    begin(client);
}

static void count_event(struct client *client, const char *content, int64_t now)
{
    int64_t sent_at, held;
    if (!digits_after(content, 't', 19, &sent_at))
        return;
    bool measured = in_window(now);
    if (measured) {
        tally.events++;
        samples_add(&tally.relay, now - sent_at);
        if (client->events > 0)
            samples_add(&tally.gap, now - client->last_event_at);
        else
            samples_add(&tally.ttft, now - client->asked_at);
        if (client->events == 0 && digits_after(content + 20, 'h', 12, &held))
            samples_add(&tally.ttft_added, now - client->asked_at - held);
    }
    client->events++;
    client->last_event_at = now;
}

static void take_line(struct client *client, const char *line, size_t length, int64_t now)
{
    if (length < 12 || memcmp(line, "data:", 5) != 0)
        return;
    if (length < 20 && find_text(line, length, "[DONE]")) {
        client->done_seen = true;
        return;
    }
    const char *content = find_text(line, length, "\"content\"");
    if (!content)
        return;
    content += strlen("\"content\"");
    while (*content == ':' || *content == ' ')
        content++;
    if (*content == '"' && line + length - content > 22)
        count_event(client, content + 1, now);
}

static void take_body(void *owner, const char *data, size_t length)
{
    struct client *client = owner;
    if (!options.stream)
        return;
    int64_t now = now_ns();
    while (length > 0) {
        const char *end = memchr(data, '\n', length);
        size_t part = end ? (size_t)(end - data) + 1 : length;
        if (!end || client->line.length > 0)
            bytes_append(&client->line, data, part);
        if (end && client->line.length > 0) {
            take_line(client, client->line.data, client->line.length, now);
            client->line.length = 0;
        } else if (end) {
            take_line(client, data, part, now);
        }
        data += part;
        length -= part;
    }
}

static void send_request(struct client *client)
{
    while (client->busy && client->sent < client->request->length) {
        ssize_t sent = send(client->fd, client->request->data + client->sent, client->request->length - client->sent, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR || errno == ENOTCONN)) {
            watch(client, true);
            return;
        }
        if (sent < 0)
            return; /* the reading side learns why, after what the server had to say */
        client->sent += (size_t)sent;
        client->connected = true;
    }
    watch(client, false);
}

static void begin(struct client *client)
{
    int64_t now = now_ns();
    if (now >= shuts_at || (options.requests && issued >= options.requests))
        return;
    if (client->fd < 0)
        connect_client(client);
    issued++;
    change_in_flight(1);
    client->busy = true;
    client->begins_at = NEVER;
    client->request = &prepared.requests[next_request];
    next_request = (next_request + 1) % prepared.count;
    client->sent = 0;
    client->done_seen = false;
    client->events = 0;
    client->line.length = 0;
    message_start(&client->response, MESSAGE_RESPONSE);
    client->asked_at = now_ns();
    if (client->connected)
        send_request(client);
}

static void take(struct client *client, const char *data, size_t length)
{
    while (length > 0 && client->busy) {
        size_t used = message_feed(&client->response, data, length, take_body, client);
        data += used;
        length -= used;
        if (client->response.state == MESSAGE_BROKEN) {
            fail(client, LOST, "not HTTP/1.1", 12);
            return;
        }
        if (client->response.state == MESSAGE_DONE) {
            complete(client);
            if (length > 0 && client->fd >= 0) /* bytes that no request asked for */
                fail(client, LOST, "bytes after the answer", 22);
            return;
        }
    }
}

static void receive(struct client *client)
{
    static char data[262144];
    ssize_t got = recv(client->fd, data, sizeof data, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got > 0) {
        take(client, data, (size_t)got);
    } else if (!client->busy) { /* a kept-alive connection may close between requests */
        disconnect(client);
    } else if (got == 0 && client->response.state == MESSAGE_UNTIL_CLOSE) {
        complete(client);
    } else {
        const char *why = got == 0 ? "closed by the server" : strerror(errno);
        fail(client, client->connected ? LOST : CONNECT, why, strlen(why));
    }
}

static void begin_due(int64_t now)
{
    if (now < next_begin)
        return;
    next_begin = NEVER;
    for (int i = 0; i < options.connections; i++) {
        struct client *client = &clients[i];
        if (client->begins_at <= now) {
            client->begins_at = NEVER;
            begin(client);
        }
        if (client->begins_at < next_begin)
            next_begin = client->begins_at;
    }
}

static void set_times(void)
{
    int64_t now = now_ns();
    opens_at = now + (int64_t)(options.warmup_seconds * 1e9);
    shuts_at = opens_at + (int64_t)(options.seconds * 1e9);
    gives_up_at = shuts_at + 5000000000 + (options.stream ? (int64_t)options.events * options.pace_ms * 1000000 : 0);
    for (int i = 0; i < options.connections; i++) {
        clients[i] = (struct client){.fd = -1, .begins_at = NEVER};
        begin_at(&clients[i], now + (int64_t)(options.warmup_seconds * 0.9e9 * i / options.connections));
    }
}

static bool finished(int64_t now)
{
    if (error_count(&tally) >= MAX_ERRORS || now >= gives_up_at)
        return true;
    bool no_more = now >= shuts_at || (options.requests && issued >= options.requests);
    return no_more && in_flight == 0;
}

static void turn(int64_t wake_at)
{
    struct epoll_event events[TURN_EVENTS];
    int64_t left = wake_at - now_ns();
    int count = epoll_wait(poller, events, TURN_EVENTS, left <= 0 ? 0 : (int)((left + 999999) / 1000000));
    for (int i = 0; i < count; i++) {
        struct client *client = events[i].data.ptr;
        if (client->fd >= 0 && (events[i].events & EPOLLOUT) && !(events[i].events & EPOLLERR))
            send_request(client);
        if (client->fd >= 0 && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
            receive(client);
    }
}

static double cpu_seconds(void)
{
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + (double)used.tv_nsec / 1e9;
}

static void open_window(int64_t now)
{
    tally.cpu_seconds = cpu_seconds();
    in_flight_since = now;
    fprintf(stderr, "open\n");
}

static void shut_window(int64_t now, int64_t opened_at)
{
    fprintf(stderr, "shut\n");
    tally.seconds = (double)(now - opened_at) / 1e9;
    tally.cpu_seconds = cpu_seconds() - tally.cpu_seconds;
    tally.in_flight_seconds += (double)in_flight * (double)(now - in_flight_since) / 1e9;
}

static void run(void)
{
    int64_t opened_at = 0;
    for (bool shut = false;;) {
        int64_t now = now_ns();
        bool over = finished(now);
        if (!opened_at && (now >= opens_at || over))
            open_window(opened_at = now);
        if (!shut && (now >= shuts_at || over)) {
            shut_window(now, opened_at);
            shut = true;
        }
        if (over)
            return;
        begin_due(now);
        int64_t wake_at = now < opens_at ? opens_at : now < shuts_at ? shuts_at : gives_up_at;
        turn(next_begin < wake_at ? next_begin : wake_at);
    }
}

int main(int argc, char **argv)
{
    options = read_options(argc, argv);
    prepared = prepare_requests(&options);
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(EPOLL_CLOEXEC);
    clients = allocate((size_t)options.connections * sizeof *clients);
    set_times();
    run();
    for (; in_flight > 0; in_flight--)
        note_error(&tally, UNFINISHED, "no end in time", 14);
    print_tally(&tally, options.connections);
    return error_count(&tally) ? 3 : 0;
}
