"""All tasks have ended when the block has, and one failure ends all."""

import asyncio
from collections.abc import Awaitable

import pytest

from gateway.embeddings.rerank import Tasks
from tests.unit.scheduling.virtual_time import run


async def after(seconds: float, result: str = "", error: Exception | None = None) -> str:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return result


def test_the_block_ends_with_the_last_task_also_of_those_that_tasks_have_started() -> None:
    async def main() -> None:
        async def first(tasks: Tasks) -> None:
            started.append(tasks.start(after(3.0, "second")))

        started: list[Awaitable[str]] = []
        async with Tasks() as tasks:
            tasks.start(first(tasks))
        assert await started[0] == "second"
        assert asyncio.get_running_loop().time() >= 3.0

    run(main())


def test_when_one_fails_the_others_are_aborted_and_the_block_raises_why() -> None:
    async def main() -> None:
        others = []

        async def block() -> None:
            async with Tasks() as tasks:
                others.append(tasks.start(after(60.0)))
                tasks.start(after(1.0, error=ValueError("first")))

        with pytest.raises(ValueError, match="first"):
            await block()
        assert others[0].cancelled()
        async with asyncio.timeout(5.0):  # which a half cancelled task would break
            await asyncio.sleep(1.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(60.0)

    run(main())


def test_a_block_that_is_left_aborts_all() -> None:
    async def main() -> None:
        others = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0), Tasks() as tasks:
                others.append(tasks.start(after(60.0)))
        assert others[0].cancelled()

    run(main())


def test_a_block_without_tasks_ends_at_once() -> None:
    async def main() -> None:
        async with Tasks():
            pass

    run(main())
