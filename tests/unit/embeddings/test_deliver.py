"""Answers go out at once or in pieces, no faster than they are taken."""

import asyncio
from collections.abc import Iterator

from gateway.features.embeddings.batcher import deliver_in_parts
from tests.unit.embeddings.scene import Scene
from tests.unit.front.wires import FakeWire, reply_on
from tests.unit.scheduling.virtual_time import run, turns


def test_a_short_answer_goes_at_once() -> None:
    async def main() -> None:
        wire = await Scene().ask("a text", encoding="float")
        assert wire.header(b"content-length") == b"%d" % len(wire.body)

    run(main())


def test_a_long_answer_is_made_while_it_is_taken() -> None:
    async def main() -> None:
        wire, made = FakeWire(), 0
        reply = reply_on(wire)

        def pieces() -> Iterator[bytes]:
            nonlocal made
            for number in range(10):
                made += 1
                yield b"%d" % number

        wire.blocked = True
        task = asyncio.create_task(deliver_in_parts(reply, pieces()))
        await turns(5)
        assert made == 1
        for _ in range(3):
            assert reply.on_writable is not None
            reply.on_writable()
            reply.on_writable()
            await turns(3)
        assert made == 4
        wire.blocked = False
        reply.on_writable()
        await task
        assert reply.on_writable is None
        assert reply.complete
        assert wire.body == b"0123456789"

    run(main())


def test_others_have_their_turn_meanwhile() -> None:
    async def main() -> None:
        turn, seen = 0, []

        def pieces() -> Iterator[bytes]:
            for _ in range(5):
                seen.append(turn)
                yield b"x"

        task = asyncio.create_task(deliver_in_parts(reply_on(FakeWire()), pieces()))
        while not task.done():
            await asyncio.sleep(0)
            turn += 1
        assert len(set(seen)) == 5

    run(main())
