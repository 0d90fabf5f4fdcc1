"""Files that a thread opens for a batch, whose task may be cancelled meanwhile."""

import asyncio
import threading

import pytest

from gateway.batches.files import to_its_end


async def test_what_a_cancelled_task_opens_is_given_back() -> None:
    begun, goes_on, given_back = threading.Event(), threading.Event(), list[str]()

    def opened() -> str:
        begun.set()
        goes_on.wait(10)
        return "a file"

    task = asyncio.create_task(to_its_end(opened, undo=given_back.append))
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done(), "it ends first"
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert given_back == ["a file"]
