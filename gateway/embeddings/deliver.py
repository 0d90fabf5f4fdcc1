"""Sending a client its answer: at once, or piece by piece if it is long, so that nobody else has to wait meanwhile."""

import asyncio
from collections.abc import Iterator

from gateway.front.reply import JSON, Reply

_WHOLE_BYTES = 1048576


async def deliver(reply: Reply, pieces: Iterator[bytes], size_bytes: int) -> None:
    """Write an answer of about this size. A long one is made as fast as the client takes it."""
    if size_bytes <= _WHOLE_BYTES:
        reply.send(200, JSON, b"", b"".join(pieces))
        return
    reply.begin(200, JSON, b"")
    for piece in pieces:
        if reply.write(piece):
            await _room(reply)
        else:
            await asyncio.sleep(0)
    reply.end()


async def _room(reply: Reply) -> None:
    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def has_come() -> None:
        if not room.done():
            room.set_result(None)

    reply.on_room = has_come
    try:
        if reply.blocked:
            await room
    finally:
        reply.on_room = None
