"""Long work in turns of the event loop, between which others get theirs: in steps, and a peer's bytes in slices.

A loop reads up to 8 MiB of one connection in a turn, and a few bytes can be an item that costs a microsecond: a chunk,
a frame, an event, a header. So a protocol hands every long read to its `Intake`, which gives it back in slices, one in
a turn, and reads no more until the last one is taken. A usual read is a short one, and passes by at the cost of
comparing its length.
"""

import asyncio
from collections.abc import Callable, Generator
from typing import Final, TypeVar

SLICE_BYTES: Final = 16384  # of the smallest items, a few milliseconds
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
    result: Result
    is_done = False
    try:
        while not is_done:
            try:
                next(steps)
            except StopIteration as end:
                result, is_done = end.value, True
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    finally:
        steps.close()  # what it has reserved is given back, also if its client leaves
    return result


class Intake:
    """Reads from one transport, whose protocol gives long reads to `cut`.

    `take` gets the slices, in order: `data_received` of the protocol; None = nothing is cut, as reads are short.
    `hold` and `go_on` are backpressure; slices wait with the bytes that are still in the socket.
    """

    def __init__(self, take: Callable[[bytes], None] | None = None) -> None:
        self.is_held = False
        self._take = take
        self._transport: asyncio.Transport | None = None
        self._rest = b""  # read, and not taken
        self._at = 0  # where the rest begins
        self._reads = True
        self._next: asyncio.Handle | None = None

    @property
    def has_more(self) -> bool:
        """Whether bytes that were read are not taken yet."""
        return bool(self._rest)

    def begin(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def hold(self) -> None:
        """Take nothing, and read nothing, until `go_on`."""
        if not self.is_held:
            self.is_held = True
            self._follow()

    def go_on(self) -> None:
        if self.is_held:
            self.is_held = False
            self._follow()

    def resumed(self) -> None:
        """Other code has resumed the transport: go on, but not before it is due."""
        self.is_held, self._reads = False, True
        self._follow()

    def cut(self, data: bytes) -> None:
        """Take a long read in slices, the first one now."""
        self._rest, self._at = self._rest[self._at :] + data, 0
        if self._next is None:
            self._turn()

    def pause(self) -> None:
        """Read nothing more in this turn."""
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)
            self._follow()

    def drop(self) -> None:
        """Forget what is not taken yet: the protocol has aborted the connection."""
        self._rest = b""

    def end(self) -> None:
        """The connection is lost: what came before its end, and was not dropped, is taken now."""
        if self._next is not None:
            self._next.cancel()
        rest, at, take = self._rest, self._at, self._take
        self._rest, self._take, self._transport = b"", None, None  # the bytes and the protocol live no longer than this
        while at < len(rest) and take is not None:
            take(rest[at : at + SLICE_BYTES])
            at += SLICE_BYTES

    def _turn(self) -> None:
        self._next = None
        if self.is_held or not self._rest:
            self._follow()
            return
        data = self._rest[self._at : self._at + SLICE_BYTES]
        self._at += SLICE_BYTES
        if self._at >= len(self._rest):
            self._rest, self._at = b"", 0
        self._follow()
        if self._take is not None:
            self._take(data)

    def _follow(self) -> None:
        """Read from the transport if nothing is held back, and take the next slice in the next turn if there is one."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._rest and not self.is_held and self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)
        reads = not self.is_held and self._next is None
        if reads != self._reads:
            self._reads = reads
            if reads:
                transport.resume_reading()
            else:
                transport.pause_reading()
