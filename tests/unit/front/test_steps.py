import asyncio

import pytest

from gateway.core.turns import Steps, at_once, in_turns


def work(log: list[str]) -> Steps[int]:
    log.append("one")
    yield
    log.append("two")
    yield
    log.append("three")
    return 3


def failing() -> Steps[int]:
    yield
    raise ValueError("no")


def test_work_at_once_gives_its_result() -> None:
    log: list[str] = []
    assert at_once(work(log)) == 3
    assert log == ["one", "two", "three"]


async def test_the_event_loop_turns_twice_after_every_step() -> None:
    log: list[str] = []

    async def other() -> None:
        while True:
            log.append("other")
            await asyncio.sleep(0)

    task = asyncio.get_running_loop().create_task(other())
    assert await in_turns(work(log)) == 3
    task.cancel()
    assert log == ["one", "other", "other", "two", "other", "other", "three", "other", "other"]


async def test_an_error_in_a_step_is_the_callers() -> None:
    with pytest.raises(ValueError, match="no"):
        at_once(failing())
    with pytest.raises(ValueError, match="no"):
        await in_turns(failing())
