"""Threads by purpose: calls wait for others of their purpose only, and what never returns keeps nothing."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref

import pytest

from gateway.core.threads import Threads

WAIT_SECONDS = 4.0


class Gate:
    """What calls block in, until it opens."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.entered = threading.Semaphore(0)

    def passes(self, value: int = 0) -> int:
        self.entered.release()
        assert self._open.wait(WAIT_SECONDS)
        return value

    def open(self) -> None:
        self._open.set()

    async def is_entered(self, times: int = 1) -> None:
        for _ in range(times):
            assert await Threads("test").run(self.entered.acquire, timeout=WAIT_SECONDS)


async def test_a_purpose_that_hangs_holds_up_no_other() -> None:
    gate, hanging, other = Gate(), Threads("hanging", 2), Threads("other")
    stuck = [asyncio.create_task(hanging.run(gate.passes, number)) for number in range(4)]
    await gate.is_entered(2)
    assert await other.run(lambda: 7) == 7
    assert "2 of 2, 2 calls wait" in repr(hanging)
    gate.open()
    assert await asyncio.gather(*stuck) == [0, 1, 2, 3]


async def test_calls_of_one_thread_are_made_one_after_the_other() -> None:
    threads, made = Threads("one"), list[int]()
    await asyncio.gather(*[threads.run(made.append, number) for number in range(100)])
    assert made == [*range(100)]


async def test_what_a_call_raises_is_raised_to_its_task_and_kept_by_no_cycle() -> None:
    class Owner:
        def fail(self) -> None:
            raise OSError("no")

    gc.disable()
    try:
        owner, threads = Owner(), Threads("one")
        seen = weakref.ref(owner)
        with pytest.raises(OSError, match="no"):
            await threads.run(owner.fail)
        del owner
        await threads.run(lambda: None)
        assert seen() is None
    finally:
        gc.enable()


async def test_a_thread_that_waits_holds_nothing_of_its_last_call() -> None:
    class Given:
        """What a call is given."""

    threads, given = Threads("one"), Given()
    seen = weakref.ref(given)
    await threads.run(id, given)
    del given
    async with asyncio.timeout(WAIT_SECONDS):  # much less than a thread waits for its next call
        while seen() is not None:
            await asyncio.sleep(0.001)


async def test_a_call_that_waits_is_dropped_when_its_task_is_cancelled() -> None:
    gate, threads, made = Gate(), Threads("one"), list[int]()
    first = asyncio.create_task(threads.run(gate.passes))
    await gate.is_entered()
    second = asyncio.create_task(threads.run(made.append, 1))
    await asyncio.sleep(0)
    second.cancel()
    gate.open()
    await first
    await threads.run(made.append, 2)
    assert made == [2]


async def test_what_must_end_ends_before_its_task_does_and_is_given_back() -> None:
    gate, given_back = Gate(), list[int]()
    task = asyncio.create_task(Threads("one").to_its_end(gate.passes, 3, undo=given_back.append))
    await gate.is_entered()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert given_back == [3]


async def test_what_is_done_later_is_waited_for_by_nobody_and_may_fail() -> None:
    gate, threads = Gate(), Threads("one")
    threads.later(gate.passes)
    threads.later(lambda: 1 // 0)
    await gate.is_entered()
    gate.open()
    assert await threads.run(lambda: 7) == 7


def test_a_process_ends_while_a_call_hangs() -> None:
    program = """
import asyncio, threading
from gateway.core.threads import Threads

async def main():
    hanging, entered = Threads("hanging"), threading.Event()
    asyncio.get_running_loop().create_task(hanging.run(lambda: (entered.set(), threading.Event().wait())))
    await Threads("other").run(entered.wait)

asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
