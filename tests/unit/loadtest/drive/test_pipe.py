"""The worker's end of a real pipe, under the event loop that workers have."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Iterator
from multiprocessing import Pipe as make_pipe
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from loadtest.drive.record import Record
from loadtest.drive.worker import FinishedRequests, FromWorker, Pipe, Start, Stop, ToWorker

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    Parent = Connection[ToWorker, FromWorker]
    Worker = Connection[FromWorker, ToWorker]
    Ends = tuple[Parent, Worker]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The parent's and the worker's."""
    ours, theirs = make_pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """uvloop, as in a worker."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as running:
        yield running


def _progress(count: int) -> FinishedRequests:
    return FinishedRequests(
        0, [Record(i, 0, 0.0, sent=0.0, end=1.0, outcome="ok", detail=f"answer {i}") for i in range(count)], in_flight=7
    )


def _buffer_bytes(end: Any) -> int:
    with socket.socket(fileno=os.dup(end.fileno())) as view:
        return sum(view.getsockopt(socket.SOL_SOCKET, option) for option in (socket.SO_SNDBUF, socket.SO_RCVBUF))


def test_messages_larger_than_the_buffers_arrive_whole_from_a_parent_that_reads_late(
    ends: Ends, runner: asyncio.Runner
) -> None:
    ours, theirs = ends
    sent = [_progress(20_000), _progress(5_000), _progress(0)]
    assert len(pickle.dumps(sent[0])) > 2 * (_buffer_bytes(ours) + _buffer_bytes(theirs))

    async def worker() -> list[FromWorker]:
        loop = asyncio.get_running_loop()
        with Pipe(theirs, loop) as pipe:
            for message in sent:
                pipe.send(message)
            ours.send(Start(5.0))
            assert await pipe.receive() == Start(5.0)  # the first message is still waiting for its reader
            return await loop.run_in_executor(None, lambda: [ours.recv() for _ in sent])

    assert runner.run(worker()) == sent


def test_leaving_waits_until_the_last_message_is_written(ends: Ends, runner: asyncio.Runner) -> None:
    ours, theirs = ends

    async def worker() -> FromWorker:
        loop = asyncio.get_running_loop()
        with Pipe(theirs, loop) as pipe:
            reading = loop.run_in_executor(None, ours.recv)
            pipe.send(_progress(20_000))
        theirs.close()
        return await reading

    assert runner.run(worker()) == _progress(20_000)


def test_a_parent_that_is_gone_is_the_end_of_its_messages_and_blocks_nothing(
    ends: Ends, runner: asyncio.Runner
) -> None:
    ours, theirs = ends

    async def worker() -> list[ToWorker | None]:
        with Pipe(theirs, asyncio.get_running_loop()) as pipe:
            ours.send(Stop())
            first = await pipe.receive()
            ours.close()
            pipe.send(_progress(20_000))
            pipe.send(_progress(1))
            return [first, await pipe.receive()]

    assert runner.run(worker()) == [Stop(), None]
