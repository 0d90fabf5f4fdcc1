#define _GNU_SOURCE
#include "options.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

struct options read_options(int argc, char **argv)
{
    static const struct option known[] = {
        {"port", required_argument, NULL, 'p'},     {"bodies", required_argument, NULL, 'b'},
        {"path", required_argument, NULL, 'P'},     {"connections", required_argument, NULL, 'c'},
        {"warmup", required_argument, NULL, 'w'},   {"seconds", required_argument, NULL, 'd'},
        {"events", required_argument, NULL, 'n'},   {"pace-ms", required_argument, NULL, 'i'},
        {"requests", required_argument, NULL, 'r'}, {"stream", no_argument, NULL, 's'},
        {"refused-pause-ms", required_argument, NULL, 'f'},
        {0},
    };
    struct options options = {
        .connections = 1, .events = 100, .warmup_seconds = 1, .seconds = 3, .path = "/v1/chat/completions"};
    for (int option; (option = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        switch (option) {
        case 'p': options.port = atoi(optarg); break;
        case 'b': options.bodies = optarg; break;
        case 'P': options.path = optarg; break;
        case 'c': options.connections = atoi(optarg); break;
        case 'w': options.warmup_seconds = atof(optarg); break;
        case 'd': options.seconds = atof(optarg); break;
        case 'n': options.events = atoi(optarg); break;
        case 'i': options.pace_ms = atoi(optarg); break;
        case 'r': options.requests = atol(optarg); break;
        case 's': options.stream = true; break;
        case 'f': options.refused_pause_ms = atoi(optarg); break;
        default: exit(2);
        }
    }
    if (!options.bodies || options.port <= 0 || options.connections <= 0 || options.seconds <= 0 || options.events <= 0) {
        fprintf(stderr, "usage: load --port P --bodies FILE [options]   (load.c explains them)\n");
        exit(2);
    }
    return options;
}

/* BODY, a JSON object that has none of the options yet, with the options added before its closing brace. */
static struct bytes prepare(const struct options *options, const char *body, size_t length)
{
    struct bytes added = {0}, request = {0};
    if (options->stream)
        bytes_format(&added, ",\"stream\":true,\"max_tokens\":%d", options->events);
    if (options->stream && options->pace_ms)
        bytes_format(&added, ",\"seed\":%d", options->pace_ms);
    bytes_append(&added, "}", 1);
    bytes_format(&request, "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: load\r\nAccept: */*\r\n"
                           "Content-Type: application/json\r\nAuthorization: Bearer sk-bench\r\nContent-Length: %zu\r\n\r\n",
                 options->path, options->port, length - 1 + added.length);
    bytes_append(&request, body, length - 1);
    bytes_append(&request, added.data, added.length);
    bytes_free(&added);
    return request;
}

struct prepared prepare_requests(const struct options *options)
{
    struct prepared prepared = {0};
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    FILE *file = fopen(options->bodies, "r");
    if (!file) {
        perror(options->bodies);
        exit(1);
    }
    while ((length = getline(&line, &capacity, file)) > 0) {
        while (length > 0 && line[length - 1] != '}')
            length--;
        if (length == 0)
            continue;
        prepared.requests = reallocate(prepared.requests, (prepared.count + 1) * sizeof *prepared.requests);
        prepared.requests[prepared.count++] = prepare(options, line, (size_t)length);
    }
    free(line);
    fclose(file);
    if (prepared.count == 0) {
        fprintf(stderr, "%s: no bodies\n", options->bodies);
        exit(1);
    }
    return prepared;
}
