"""The capacity of this client, measured and looked up before a run: token events a second, and open files.

A limit known beforehand is cheaper than an invalid run.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from loadtest.drive.client import StreamWatch
from loadtest.drive.connections import Received, ServerConnection
from loadtest.drive.plan import Plan, shared_out

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"a-model-of-some-name","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":null}]}\n\n'
)
_CHUNK = b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT)
_STREAMS = 64
_ROUNDS = 24
_AT_ONCE = 4  # as where streams are not in step
# Reading is this part of a stream's cost; requests, gaps between tokens and reports are the rest.
_READING_SHARE = 0.5
# Of a core; above it the verdict calls a worker the bottleneck.
USABLE_SHARE = 0.85
_OTHER_FILES = 64


async def token_events_per_second() -> float:
    """How many tokens a process can take on a core that it has alone, by the CPU time of reading some, one a read."""
    loop = asyncio.get_running_loop()
    spent = 0.0
    with ExitStack() as open_ends:
        streams: list[tuple[socket.socket, Received]] = []
        for _ in range(_STREAMS):
            theirs, ours = socket.socketpair()
            open_ends.enter_context(theirs)
            _, connection = await loop.create_connection(lambda: ServerConnection(time.monotonic), sock=ours)
            open_ends.callback(connection.close)
            streams.append((theirs, Received(time.monotonic)))
            connection.send(b"-", streams[-1][1])
        for number in range(_ROUNDS):
            for start in range(0, _STREAMS, _AT_ONCE):
                ready = streams[start : start + _AT_ONCE]
                for theirs, _ in ready:
                    theirs.sendall(_CHUNK if number else _HEAD + _CHUNK)
                before = time.process_time()
                while any(len(received.reads) <= number for _, received in ready):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                spent += time.process_time() - before
        before = time.process_time()
        for _, received in streams:
            watch = StreamWatch()
            for at, data in received.take():
                watch.feed(data, at)
        spent += time.process_time() - before
    await asyncio.sleep(0)  # closes the connections
    return USABLE_SHARE * _READING_SHARE * _STREAMS * _ROUNDS / max(spent, 1e-6)


def raise_file_limit(wanted: int) -> int:
    """Takes as many open files as the system allows, more than that where this process may; returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (max(wanted, hard), hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        except (ValueError, OSError):
            continue
        return limit
    return hard


def files_of(plan: Plan, worker: int) -> int:
    """The open files that a worker needs for its streams; of an open loop it is not known."""
    return shared_out(plan.slots, worker, plan.workers) + _OTHER_FILES


@dataclass(frozen=True, slots=True)
class Capacity:
    """One worker's measurements of itself before the run."""

    token_events_per_second: float
    open_files: int


def client_limits(plan: Plan, capacities: Sequence[Capacity], cpus: int) -> tuple[str, list[str]]:
    """The client's limit in words, and the part of the plan beyond it."""
    alone = min(1.0, cpus / max(1, len(capacities)))
    most = sum(one.token_events_per_second for one in capacities) * alone
    files = min((one.open_files for one in capacities), default=0)
    workers = f"{len(capacities)} worker{'s' if len(capacities) != 1 else ''}"
    text = f"client limit: about {_rounded(most):,} tokens/s with {workers}, {files:,} open files each"
    beyond = []
    offered = tokens_offered_per_second(plan)
    if offered is not None and offered > most:
        beyond.append(
            f"the plan offers up to {offered:,.0f} tokens/s, more than this client can read: "
            "use more --workers, on cores that nothing else uses"
        )
    needed = max((files_of(plan, worker) for worker in range(plan.workers)), default=0)
    if plan.slots and needed > files:
        beyond.append(
            f"a worker needs {needed:,} open files for its users, and the system allows {files:,}: "
            "raise the limit (ulimit -Hn) or use more --workers"
        )
    return text, beyond


def tokens_offered_per_second(plan: Plan) -> float | None:
    """Of an open loop at a rate; a closed loop takes what the server gives."""
    if plan.rate_per_second is None or not plan.stream:
        return None
    return max(plan.rate_per_second, plan.first_rate_per_second or 0.0) * plan.workload.max_tokens


def _rounded(value: float) -> int:
    """To two digits: it is no more exact than that."""
    return int(float(f"{value:.1e}"))
