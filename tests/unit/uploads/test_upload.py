import asyncio
from collections.abc import Callable

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.resources import Holding, MemoryBudget
from gateway.features.uploads.audio import Upload
from tests.unit.scheduling.virtual_time import run, turns


def upload_of(read_more: Callable[[bool], None] = lambda _: None) -> Upload:
    return Upload(read_more, Holding(MemoryBudget(10_000_000)))


async def all_of(upload: Upload) -> list[bytes]:
    return [piece async for piece in upload]


def test_pieces_come_out_in_order_as_they_arrive() -> None:
    async def main() -> None:
        upload = upload_of()
        reading = asyncio.create_task(all_of(upload))
        for piece in (b"a", b"b", b"c"):
            upload.feed(piece)
            await turns(2)
        upload.end()
        assert await reading == [b"a", b"b", b"c"]

    run(main())


def test_pieces_that_arrived_before_an_error_come_out_before_it() -> None:
    async def main() -> None:
        upload = upload_of()
        upload.feed(b"a")
        upload.end(InvalidRequest("gone"))
        assert await anext(upload) == b"a"
        with pytest.raises(InvalidRequest, match="gone"):
            await anext(upload)

    run(main())


def test_an_error_reaches_a_waiting_reader() -> None:
    async def main() -> None:
        upload = upload_of()
        reading = asyncio.create_task(all_of(upload))
        await turns(2)
        upload.end(InvalidRequest("gone"))
        with pytest.raises(InvalidRequest, match="gone"):
            await reading

    run(main())


def test_what_is_looked_at_stays_and_more_is_read_for_a_look_up_to_its_limit() -> None:
    async def main() -> None:
        calls: list[bool] = []
        upload = upload_of(calls.append)
        upload.feed(b"a" * 65536 + b"b" * 983040)
        assert await upload.peek(0, 2_000_000) == b"a" * 65536
        looking = asyncio.create_task(upload.peek(1048576, 2_000_000))
        await turns(2)
        assert calls == [False, True]
        upload.feed(b"c")
        assert await looking == b"c"
        assert await upload.peek(1048577, 1048577) == b""
        upload.end()
        assert await upload.peek(1048577, 2_000_000) == b""
        assert b"".join(await all_of(upload)) == b"a" * 65536 + b"b" * 983040 + b"c"

    run(main())


def test_an_error_reaches_who_looks() -> None:
    async def main() -> None:
        upload = upload_of()
        looking = asyncio.create_task(upload.peek(0, 100))
        await turns(2)
        upload.end(InvalidRequest("gone"))
        with pytest.raises(InvalidRequest, match="gone"):
            await looking

    run(main())


def test_the_client_is_held_back_while_too_much_waits() -> None:
    async def main() -> None:
        calls: list[bool] = []
        upload = upload_of(calls.append)
        upload.feed(b"x" * 1048575)
        assert calls == []
        upload.feed(b"y")
        assert calls == [False]
        await anext(upload)
        assert calls == [False, True]

    run(main())


def test_a_piece_is_reserved_until_the_next_one_is_asked_for() -> None:
    async def main() -> None:
        budget = MemoryBudget(10_000_000)
        upload = Upload(lambda _: None, Holding(budget))
        upload.feed(b"a" * 65536 + b"b" * 1000)
        upload.end()
        await anext(upload)
        assert budget.used_bytes == 66536, "the consumer has the first piece"
        await anext(upload)
        assert budget.used_bytes == 1000
        with pytest.raises(StopAsyncIteration):
            await anext(upload)
        assert budget.used_bytes == 0

    run(main())


def test_a_piece_that_was_given_is_given_back_at_the_end() -> None:
    async def main() -> None:
        budget = MemoryBudget(10_000_000)
        upload = Upload(lambda _: None, Holding(budget))
        upload.feed(b"a" * 100_000)
        await anext(upload)
        upload.close()
        upload.close()
        assert budget.used_bytes == 0

    run(main())
