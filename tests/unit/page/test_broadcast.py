"""One stream for all watchers: made while somebody watches, bounded, and ended for who does not read."""

import asyncio
from contextlib import ExitStack
from typing import Any

import orjson
import pytest

from gateway.core.errors import Draining, RateLimited
from gateway.core.supervisor import Supervisor
from gateway.features.page.broadcast import MOST_WATCHERS, Broadcast, Messages


class Shown:
    """Counts what is made."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails = False

    def begin(self) -> None:
        self.log.append("begin")

    def end(self) -> None:
        self.log.append("end")

    def full(self) -> dict[str, Any]:
        return {"made": len(self.log)}

    def tick(self) -> dict[str, Any]:
        self.log.append("tick")
        if self.fails:
            raise ValueError("a bug")
        return {"made": len(self.log)}


class Scene:
    """A stream that ticks 500 times a second."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.shown = Shown()
        self.watched: list[bool] = []
        self.supervisor = Supervisor(loop.time)
        self.stream = Broadcast(
            self.shown, self.watched.append, self.supervisor, clock=lambda: 0.0, period_seconds=0.002
        )


async def read(messages: Messages) -> tuple[str, Any]:
    async with asyncio.timeout(5):
        message = await messages.get()
    assert message is not None
    assert message.endswith(b"\n\n")
    kind, data = message.decode().strip().split("\n")
    return kind.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))


async def test_a_watcher_gets_everything_and_then_what_is_new() -> None:
    scene = Scene()
    with scene.stream.watching() as messages:
        assert await read(messages) == ("full", {"made": 1})
        assert [await read(messages) for _ in range(2)] == [("tick", {"made": 2}), ("tick", {"made": 3})]
        assert scene.watched == [True]
    assert scene.watched == [True, False]
    made = len(scene.shown.log)
    assert scene.shown.log[0] == "begin"
    assert scene.shown.log[-1] == "end"
    await asyncio.sleep(0.02)
    assert len(scene.shown.log) == made  # nothing is made for nobody


async def test_watchers_share_what_is_made() -> None:
    scene = Scene()
    with scene.stream.watching() as one, scene.stream.watching() as other:
        await read(one)
        await read(other)
        assert await read(one) == await read(other)
        assert scene.shown.log.count("begin") == 1
        assert scene.stream.watchers == 2


async def test_the_number_of_watchers_is_bounded() -> None:
    scene = Scene()
    blocks = [scene.stream.watching() for _ in range(MOST_WATCHERS)]
    for block in blocks:
        block.__enter__()
    with pytest.raises(RateLimited, match="16 pages"), scene.stream.watching():
        pass
    blocks.pop().__exit__(None, None, None)
    with scene.stream.watching() as messages:
        assert (await read(messages))[0] == "full"
    for block in blocks:
        block.__exit__(None, None, None)
    assert scene.watched == [True, False]


async def test_a_watcher_that_does_not_read_is_cut_off() -> None:
    scene = Scene()
    with scene.stream.watching() as slow, scene.stream.watching() as quick:
        for _ in range(20):
            await read(quick)
        assert await slow.get() is None


async def test_all_streams_end_and_begin_again_unless_it_has_stopped() -> None:
    scene = Scene()
    with scene.stream.watching() as one, scene.stream.watching() as other:
        scene.stream.end_streams()
        assert (await one.get(), await other.get()) == (None, None)
    with scene.stream.watching() as again:
        assert (await read(again))[0] == "full"
        scene.stream.stop()
        assert await again.get() is None
    with pytest.raises(Draining, match="Another process serves now"), scene.stream.watching():
        pass


async def test_what_goes_wrong_in_a_look_is_counted_and_the_stream_goes_on() -> None:
    scene = Scene()
    with scene.stream.watching() as messages:
        await read(messages)
        scene.shown.fails = True
        while not scene.supervisor.faults:
            await asyncio.sleep(0.002)
        scene.shown.fails = False
        while (await read(messages))[0] != "tick":
            pass
    assert scene.supervisor.faults.keys() == {"dashboard"}


async def test_looks_that_take_long_come_later() -> None:
    scene, now = Scene(), [0.0]

    def clock() -> float:
        now[0] += 0.05  # so long does a look take
        return now[0]

    stream = Broadcast(scene.shown, scene.watched.append, scene.supervisor, clock=clock, period_seconds=0.001)
    with stream.watching() as messages:
        await read(messages)
        await read(messages)
        assert stream.look_seconds == pytest.approx(0.05)
        ticks = scene.shown.log.count("tick")
        await asyncio.sleep(0.05)
        assert scene.shown.log.count("tick") == ticks  # the next one is due after 5 s


async def test_a_watcher_that_is_cut_off_has_no_place_any_more() -> None:
    scene = Scene()
    with scene.stream.watching(), scene.stream.watching() as quick:
        while scene.stream.watchers > 1:
            await read(quick)
        assert scene.watched == [True]
    assert scene.watched == [True, False]


async def test_a_newcomer_gets_the_place_that_is_taken_longest() -> None:
    scene, now = Scene(), [0.0]
    stream = Broadcast(scene.shown, scene.watched.append, scene.supervisor, clock=lambda: now[0], period_seconds=1000.0)
    with ExitStack() as stack:
        first, *_ = [stack.enter_context(stream.watching()) for _ in range(MOST_WATCHERS)]
        now[0] = 29.0
        with pytest.raises(RateLimited):
            stack.enter_context(stream.watching())
        now[0] = 31.0
        newcomer = stack.enter_context(stream.watching())
        assert await first.get() is None
        assert (await read(newcomer))[0] == "full"
        assert stream.watchers == MOST_WATCHERS
    assert scene.watched == [True, False]
