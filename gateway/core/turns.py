"""Long work in turns of the event loop, which alternate with other work: in steps, and a peer's bytes in slices.

A loop reads up to 8 MiB of one connection in a turn, and a few bytes can be an item that costs a microsecond: a chunk,
a frame, an event, a header. So a protocol hands every long read to its `Intake`, which returns it in slices, one in a
turn, and pauses reading until the last one is taken. From then on it reads in small amounts, so that the rest stays in
the kernel. A usual read is a short one, and passes by at the cost of comparing its length.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from typing import Final, TypeVar, cast

SLICE_BYTES: Final = 16384  # of the smallest items, a few milliseconds
_BOUNDED_BYTES: Final = 2 * SLICE_BYTES  # uvloop reads up to 250 KiB per call
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

    In the first it reads from other clients, in the second it answers them.
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
        steps.close()  # its reserved memory is released, also on a disconnect
    return result


class BoundedReads(asyncio.BufferedProtocol):
    """Reads for a protocol, into a buffer of its own that is small."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol
        self._buffer = memoryview(bytearray(_BOUNDED_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.protocol.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.protocol.connection_lost(error)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.protocol.data_received(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        return self.protocol.eof_received()

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()


class Intake:
    """Reads from one transport, whose protocol gives long reads to `cut`.

    `take` gets the slices, in order: `data_received` of the protocol; None = never cut, as reads are short. `hold` and
    `go_on` are backpressure; slices wait with the bytes that are still in the socket.
    """

    def __init__(self) -> None:
        self.is_held = False
        self._take: Callable[[bytes], None] | None = None  # of the protocol, from `begin` to `end`
        self._transport: asyncio.Transport | None = None
        self.rest: deque[bytes] = deque()  # slices that are read, and not taken
        self.is_bounded = False  # since a long read
        self._reads = True
        self._next: asyncio.Handle | None = None

    def begin(self, transport: asyncio.Transport, take: Callable[[bytes], None] | None = None) -> None:
        self._transport, self._take = transport, take

    def hold(self) -> None:
        """Take nothing, and read nothing, until `go_on`."""
        if not self.is_held:
            self.is_held = True
            self._follow()

    def go_on(self) -> None:
        if self.is_held:
            self.is_held = False
            self._follow()

    def renew(self) -> None:
        """All is taken: read as at the beginning."""
        if self.is_bounded and self._transport is not None:
            self._transport.set_protocol(cast(BoundedReads, self._transport.get_protocol()).protocol)
        self.is_bounded = False
        self.go_on()

    def resumed(self) -> None:
        """Other code has resumed the transport: go on, but not before it is due."""
        self.is_held, self._reads = False, True
        self._follow()

    def cut(self, data: bytes) -> None:
        """Take a long read in slices, the first one now."""
        self.rest.extend([data[at : at + SLICE_BYTES] for at in range(0, len(data), SLICE_BYTES)])
        if self._next is None:
            self._turn()
        if self._transport is not None and not self.is_bounded:
            self.is_bounded = True
            self._transport.set_protocol(BoundedReads(cast(asyncio.Protocol, self._transport.get_protocol())))

    def pause(self) -> None:
        """Read nothing more in this turn."""
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)
            self._follow()

    def drop(self) -> None:
        """Discard pending slices: the protocol has aborted the connection."""
        self.rest.clear()

    def end(self) -> None:
        """The connection is lost: deliver the pending slices now."""
        if self._next is not None:
            self._next.cancel()
        take = self._take
        self._take = self._transport = None  # the protocol ends with this
        while self.rest and take is not None:
            take(self.rest.popleft())

    def _turn(self) -> None:
        self._next = None
        if self.is_held or not self.rest:
            self._follow()
            return
        data = self.rest.popleft()
        self._follow()
        if self._take is not None:
            self._take(data)

    def _follow(self) -> None:
        """Read from the transport if nothing is held back, and take the next slice in the next turn if there is one."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self.rest and not self.is_held and self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)
        reads = not self.is_held and self._next is None
        if reads != self._reads:
            self._reads = reads
            if reads:
                transport.resume_reading()
            else:
                transport.pause_reading()
