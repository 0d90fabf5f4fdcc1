"""The load of the restart bench: an open loop in a process of its own.

`python -m tests.bench.restarts.load OPTIONS`: sends until a line arrives on standard input, waits for what is in
flight, and leaves one line of JSON for each request in the file that the options name.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import BinaryIO

import msgspec
import uvloop

from tests.bench.restarts.requests import Planned, Requests, WrongAnswer, queue_ms
from tests.bench.soak.traffic import Caller

NEW_CONNECTIONS = 0.25  # of the requests, each on a connection of its own
_MOST_KEPT = 100  # connections; further ones are closed after their request
_SHORT_SECONDS = 60.0
_SHORTEST_STREAM_SECONDS = 5.0
_SPARE_SECONDS = 120.0  # of a long stream


class LoadOptions(msgspec.Struct, frozen=True):
    """What is sent. `long_streams`: how many there are at a time, on average; never twice as many."""

    port: int
    per_second: float
    long_streams: float
    longest_stream_seconds: float
    seed: int
    file: str


class Sent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request: when it was due, began and ended (monotonic), and what its client saw. `error`: why it failed."""

    kind: str
    due: float
    begun: float
    ended: float
    connect_seconds: float | None = None  # None = on a connection that was open
    first_byte_seconds: float = 0.0
    queue_ms: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class TimedCaller(Caller):
    """Notes when the answer begins, and why the connection ended."""

    first_byte = 0.0
    why_lost = ""

    def data_received(self, data: bytes) -> None:
        """A part of the answer."""
        self.first_byte = self.first_byte or time.monotonic()
        super().data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        """The gateway closed the connection, or this client did."""
        self.why_lost = f" ({error})" if error else ""
        super().connection_lost(error)


class Load:
    """Sends requests and notes how they ended."""

    def __init__(self, options: LoadOptions, out: BinaryIO) -> None:
        self._options = options
        self._out = out
        self._random = Random(options.seed)
        self._requests = Requests(options.seed)
        self._kept: list[TimedCaller] = []
        self._in_flight: set[asyncio.Task[None]] = set()
        self._long = 0
        self._encode = msgspec.json.Encoder().encode

    async def run(self, stop: asyncio.Event) -> None:
        """Send until `stop`, then wait for the answers."""
        options = self._options
        mean_seconds = (_shortest(options) + options.longest_stream_seconds) / 2
        short = self._arrive(stop, options.per_second, self._short)
        await asyncio.gather(short, self._arrive(stop, options.long_streams / mean_seconds, self._long_stream))
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    async def _arrive(self, stop: asyncio.Event, per_second: float, send: Callable[[float], None]) -> None:
        """Poisson arrivals; those that are late are sent one after the other."""
        due = time.monotonic()
        while not stop.is_set():
            due += self._random.expovariate(per_second)
            await asyncio.sleep(max(due - time.monotonic(), 0.0))  # late as it may be, answers are read between two
            if not stop.is_set():
                send(due)

    def _short(self, due: float) -> None:
        self._start(self._requests.short(), due, _SHORT_SECONDS)

    def _long_stream(self, due: float) -> None:
        if self._long >= 2 * self._options.long_streams:
            return
        self._long += 1
        longest = self._options.longest_stream_seconds
        planned = self._requests.long(self._random.uniform(_shortest(self._options), longest))
        self._start(planned, due, longest + _SPARE_SECONDS).add_done_callback(self._on_long_ended)

    def _on_long_ended(self, _: asyncio.Task[None]) -> None:
        self._long -= 1

    def _start(self, planned: Planned, due: float, within_seconds: float) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._one(planned, due, within_seconds))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        return task

    async def _one(self, planned: Planned, due: float, within_seconds: float) -> None:
        begun = time.monotonic()
        closes = self._random.random() < NEW_CONNECTIONS
        connect_seconds = None
        try:
            caller = None if closes else self._open_one()
            if caller is None:
                caller = await self._connect()
                connect_seconds = time.monotonic() - begun
        except OSError as error:
            self._note(Sent(planned.kind, due, begun, time.monotonic(), None, error=f"cannot connect: {error}"))
            return
        caller.first_byte, sent = 0.0, time.monotonic()
        try:
            answer, failure = await caller.ask(planned.data(closes=closes), within_seconds), ""
        except TimeoutError:
            answer, failure = b"", f"no answer within {within_seconds:g} s"
        ended = time.monotonic()
        first = (caller.first_byte or ended) - sent
        try:
            if failure:
                raise WrongAnswer(failure)
            usage = planned.check(answer)
        except (WrongAnswer, KeyError, IndexError, ValueError) as error:
            how = "a new connection" if connect_seconds is not None else "a kept connection"
            text = f"{error if isinstance(error, WrongAnswer) else repr(error)}{caller.why_lost}, on {how}"
            self._note(Sent(planned.kind, due, begun, ended, connect_seconds, first, error=text))
            caller.transport.abort()
            return
        self._note(
            Sent(
                planned.kind,
                due,
                begun,
                ended,
                connect_seconds,
                first,
                queue_ms(answer),
                usage.prompt_tokens,
                usage.cached_tokens,
            )
        )
        self._keep(caller, closes=closes)

    def _open_one(self) -> TimedCaller | None:
        while self._kept:
            caller = self._kept.pop()
            if caller.is_open:
                return caller
            caller.transport.abort()
        return None

    async def _connect(self) -> TimedCaller:
        loop = asyncio.get_running_loop()
        _, caller = await loop.create_connection(TimedCaller, "127.0.0.1", self._options.port)
        return caller

    def _keep(self, caller: TimedCaller, *, closes: bool) -> None:
        if closes or not caller.is_open or len(self._kept) >= _MOST_KEPT:
            caller.transport.close()
        else:
            self._kept.append(caller)

    def _note(self, sent: Sent) -> None:
        self._out.write(self._encode(sent) + b"\n")


def _shortest(options: LoadOptions) -> float:
    return min(_SHORTEST_STREAM_SECONDS, options.longest_stream_seconds)


def read(file: Path) -> list[Sent]:
    """The requests of a load that has ended."""
    return [msgspec.json.decode(line, type=Sent) for line in file.read_bytes().splitlines()]


async def _main(options: LoadOptions) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)
    with open(options.file, "wb") as out:
        await Load(options, out).run(stop)


if __name__ == "__main__":
    uvloop.run(_main(msgspec.json.decode(sys.argv[1], type=LoadOptions)))
