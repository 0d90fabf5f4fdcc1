"""Slots that batches share: a bound, in turn, also when it changes or a batch gives up waiting."""

import asyncio

from gateway.features.batches.slots import Slots


async def test_batches_that_always_want_one_more_take_turns() -> None:
    slots, taken = Slots(1), []

    async def feed(name: str) -> None:
        for _ in range(10):
            await slots.acquire()
            taken.append(name)
            assert slots.taken == 1
            asyncio.get_running_loop().call_soon(slots.release)

    await asyncio.gather(feed("a"), feed("b"), feed("c"))
    await asyncio.sleep(0)
    assert slots.taken == 0
    assert taken[1:25] == ["a", "b", "c"] * 8


async def test_a_higher_limit_is_used_at_once_and_who_gives_up_waiting_holds_nothing() -> None:
    slots = Slots(1)
    await slots.acquire()
    waiting = [asyncio.create_task(slots.acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    slots.apply(2)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False]
    assert slots.taken == 2
    slots.release()
    waiting[2].cancel()  # in the turn in which its slot is granted
    await asyncio.gather(*waiting, return_exceptions=True)
    assert slots.taken == 1
