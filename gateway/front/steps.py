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
    """The result of the work; the event loop has a turn after each step."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            await asyncio.sleep(0)
            result: Result = end.value
            return result
        await asyncio.sleep(0)
