"""Clients that ask for one embedding at a time, each again as soon as it is answered."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import uvloop

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


_HEAD = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class LoadFailed(Exception):
    """A request was not answered as it should be."""


@dataclass
class Answers:
    """Latencies of the requests that were answered inside the window; `all` counts those that came after it, too."""

    seconds: float
    all: int = 0
    latencies: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds


def bodies(model: str, words: int, encoding: str, seed: int) -> Iterator[bytes]:
    """Requests with one text each, without end; no text comes twice but by chance."""
    rng = random.Random(seed)
    while True:
        text = " ".join([str(rng.randrange(10_000)), *rng.choices(_WORDS, k=words - 1)])
        yield json.dumps({"model": model, "input": text, "encoding_format": encoding}).encode()


def apply(url: str, requests: Iterator[bytes], clients: int, seconds: float) -> Answers:
    """Put so many clients on a server for so long."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(put_on(url, requests, clients, seconds))


async def put_on(url: str, requests: Iterator[bytes], clients: int, seconds: float) -> Answers:
    """The same, in a loop that runs."""
    answers = Answers(seconds)
    ends = time.perf_counter() + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(_client(url, requests, ends, answers))
    return answers


async def _client(url: str, requests: Iterator[bytes], ends: float, answers: Answers) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        while (started := time.perf_counter()) < ends:
            body = next(requests)
            writer.write(_HEAD % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            answer = await reader.readexactly(int(length.split(b":")[1]))
            if not head.startswith(b"HTTP/1.1 200"):
                raise LoadFailed(f"{head.splitlines()[0].decode()}: {answer[:200].decode(errors='replace')}")
            ended = time.perf_counter()
            answers.all += 1
            if ended < ends:
                answers.latencies.append(ended - started)
    finally:
        writer.close()
