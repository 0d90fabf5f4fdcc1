"""Work done in steps, so that the event loop can turn between them.

Threads would not help: parsers and searches hold the interpreter for as long as one step takes.
"""

import asyncio
from collections.abc import Generator
from typing import TypeVar

SHORT_BYTES = 16384  # a body of up to this size is read in one step, of 5 milliseconds at most
Result = TypeVar("Result")
Steps = Generator[None, None, Result]


def at_once(steps: Steps[Result]) -> Result:
    """The result of the work, done in one go."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


async def in_turns(steps: Steps[Result]) -> Result:
    """The result of the work; the event loop has two turns after each step.

    In the first it reads what others have sent, in the second it answers them.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            await _others()
            result: Result = end.value
            return result
        await _others()


async def _others() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
