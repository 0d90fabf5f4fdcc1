"""Batches own what they hold: it is in the memory budget until it is on disk, and nothing is left of what has ended."""

import gc
import io
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.features.batches.folder import DurableFile
from tests.clients import request
from tests.fault.rig import holds, running
from tests.fault.test_batch_storage import CHAT, FILES, FORM, batch_of, ended, form, lines
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import Step, answer, chunk, completion, event, head, raw, whole

MEBIBYTE = 1 << 20
LARGE = 65536
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 100}
LINES = b"\n".join(
    orjson.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": BODY}) for number in range(3)
)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No collector of cycles: what is dropped is dropped by its owner."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def large() -> dict[int, int]:
    """The sizes of all long bytes and texts that an object of this process holds, by their ids."""
    held = chain.from_iterable(map(gc.get_referents, gc.get_objects()))
    return {id(each): len(each) for each in held if type(each) in (bytes, bytearray, str) and len(each) > LARGE}


ENDS: dict[str, tuple[Step, ...]] = {
    "whole": answer(200, completion("x" * 200_000)),
    "too large": answer(200, completion("x" * 2 * MEBIBYTE)),
    "endless event": (head(200, kind=b"text/event-stream"), chunk(event("a")), *[chunk(b"data: " + b"x" * 65536)] * 64),
    "not JSON": (raw(whole(200, b"<" * 100_000)),),
    "error": answer(500, {"error": {"message": "x" * MEBIBYTE, "type": "InternalServerError", "code": 500}}),
}


@pytest.mark.parametrize("idle_only", [False, True])
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.usefixtures("uncollected")
async def test_when_a_batch_has_ended_nothing_is_left_of_its_answers(
    kind: str, idle_only: bool, backend: ScriptedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.features.batches.sink._MOST_ANSWER_BYTES", MEBIBYTE)
    backend.plays(*ENDS[kind])
    sections = {"batches": {"path": str(tmp_path), "idle_only": idle_only}}
    async with running(backend, sections=sections) as gateway:
        before = large()
        found = await ended(gateway, await batch_of(gateway, LINES))
        assert found["request_counts"]["failed"] == (0 if kind == "whole" else 3)
        assert len(backend.ledger) >= 3
        await holds(lambda: large().keys() <= before.keys(), lambda: f"left: {large()}")
        gateway.gateway.core.finished.settle()
        gateway.counted.accepted = sum(gateway.outcomes.values())


async def test_answers_that_wait_for_the_disk_are_in_the_memory_budget(
    backend: ScriptedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, count, may_write = "x" * MEBIBYTE, 24, threading.Event()
    appended = DurableFile._append

    def slowly(file: DurableFile, data: bytes) -> None:
        assert may_write.wait(30)
        appended(file, data)

    monkeypatch.setattr(DurableFile, "_append", slowly)
    backend.plays(*answer(200, completion(text)))
    sections = {
        "batches": {"path": str(tmp_path), "idle_only": False, "lines_in_flight": count},
        "server": {"memory_budget_bytes": 16 * MEBIBYTE},
    }
    async with running(backend, sections=sections, per_backend={"max_in_flight": count}) as gateway:
        memory = gateway.gateway.core.memory
        batch = await batch_of(gateway, lines(count))
        await holds(lambda: memory.used_bytes > 14 * MEBIBYTE, "answers fill the budget")
        played = len(backend.ledger)
        assert played >= 14
        may_write.set()
        found = await ended(gateway, batch)
        assert found["request_counts"] == {"total": count, "completed": count, "failed": 0}, "none is lost"
        gateway.gateway.core.finished.settle()
        gateway.counted.accepted = sum(gateway.outcomes.values())


class Slow(io.BufferedWriter):
    """A file that is written when it may be."""

    may_write: threading.Event

    def write(self, data: Any) -> int:
        assert self.may_write.wait(30)
        return super().write(data)


async def test_uploads_that_wait_for_the_disk_or_for_their_clients_are_in_the_memory_budget(
    backend: ScriptedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slow.may_write = threading.Event()
    monkeypatch.setattr("gateway.features.batches.folder._new", lambda path: Slow(io.FileIO(path, "x")))
    count, content = 12, form(lines(1, "x" * 1_900_000))
    sections = {"batches": {"path": str(tmp_path)}, "server": {"memory_budget_bytes": 64 * MEBIBYTE}}
    async with running(backend, sections=sections) as gateway:
        memory, before = gateway.gateway.core.memory, large()
        clients = [await gateway.client() for _ in range(count)]
        for client in clients:
            await client.send(request(content, FORM, target=FILES)[:-1000])
        await holds(lambda: memory.used_bytes > count * MEBIBYTE, "the uploads wait for the disk")
        held_bytes = sum(size for each, size in large().items() if each not in before)
        assert held_bytes - count * len(content) <= memory.used_bytes * 1.2, "a buffer has room for an eighth more"
        Slow.may_write.set()
        await holds(lambda: memory.used_bytes < count * 65536, "what has come is on disk")
        for client in clients:
            await client.send(content[-1000:])
            assert (await client.answer()).status == 200
            client.close()


async def test_downloads_whose_clients_do_not_read_are_in_the_memory_budget(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    sections = {"batches": {"path": str(tmp_path)}, "server": {"memory_budget_bytes": 6 * MEBIBYTE}}
    async with running(backend, sections=sections) as gateway:
        memory = gateway.gateway.core.memory
        file = await gateway.ask(form(lines(1, "x" * 3_000_000)), FORM, target=FILES)
        target = f"/v1/files/{file.json['id']}/content".encode()
        clients = [await gateway.client(receive_buffer_bytes=4096) for _ in range(16)]
        for client in clients:
            await client.send(request(b"", method=b"GET", target=target))
        await holds(lambda: memory.used_bytes >= 16 * 262144, "each has a piece")
        async with await gateway.client() as client:
            for _ in range(8):
                await client.send(request(b"", method=b"GET", target=target))
                found = await client.answer()
                assert found.status == 200
        for client in clients:
            assert len((await client.answer()).body) > 3_000_000
            client.close()
