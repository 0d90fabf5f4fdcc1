"""Files and parts in S3, and what happens while S3 is down or slow."""

import asyncio
from pathlib import Path
from typing import Any

from tests.clients import Answer, Client, request
from tests.fault.rig import UnderTest, holds
from tests.fault.test_batch_storage import FILES, FORM, batch_of, ended, form, get, lines, upload
from tests.fault.test_shared_batches import GROUP_LINES, answers, gateways, ran
from tests.s3_server import S3Server
from tests.scripted import ScriptedBackend
from tests.scripts import allow, echo, one_of


def forgets(gateway: UnderTest, *names: str) -> None:
    """These events are expected."""
    gateway.events = [event for event in gateway.events if event["event"] not in names]


async def test_while_s3_is_down_a_batch_pauses_and_requests_are_answered(
    s3: S3Server, batches: dict[str, Any], backend: ScriptedBackend
) -> None:
    allowed = asyncio.Semaphore(100)
    backend.plays(one_of(allowed), *echo())
    async with gateways(batches, backend) as (one,):
        batch = await batch_of(one, lines(3000))
        file = batch["input_file_id"]
        await holds(allowed.locked, "lines run")
        await asyncio.to_thread(s3.stop)
        allow(allowed, 4000)
        while not (found := await get(one, f"/v1/batches/{batch['id']}")).get("paused"):
            await asyncio.sleep(0.05)
        assert (found["status"], found["paused"]) == (
            "in_progress",
            "The bucket of files and batches is not available (batches.path).",
        )
        assert (await one.ask()).status == 200
        for refused in (
            await upload(one, lines(10)),
            await one.ask(b"", method=b"GET", target=f"/v1/files/{file}/content".encode()),
        ):
            assert (refused.status, refused.error["code"]) == (503, "storage_unavailable")
        assert (await get(one, f"/v1/files/{file}"))["id"] == file
        await asyncio.to_thread(s3.start)
        batch = await ended(one, batch)
        assert batch["request_counts"] == {"total": 3000, "completed": 3000, "failed": 0}
        assert "paused" not in batch
        assert await answers(one, batch["output_file_id"]) == [*range(3000)]
        assert ran(backend) == 3001
        forgets(one, "batch_paused", "batch_bucket_unavailable")


async def patient_upload(gateway: UnderTest, content: bytes) -> Answer:
    async with await Client.connect(gateway.port) as client:
        await client.send(request(form(content), FORM, target=FILES))
        return await client.answer(60.0)


async def test_while_s3_answers_nothing_requests_wait_for_nothing(
    s3: S3Server, batches: dict[str, Any], backend: ScriptedBackend
) -> None:
    backend.plays(*echo())
    async with gateways(batches, backend) as (one,):
        batch = await batch_of(one, lines(GROUP_LINES * 3))
        await holds(lambda: ran(backend) > 20, "lines run")
        s3.freeze()
        try:
            uploads = [asyncio.create_task(patient_upload(one, lines(10))) for _ in range(40)]
            assert (await one.ask()).status == 200
            assert not any(task.done() for task in uploads)
            for _ in range(5):
                assert (await one.ask()).status == 200
            assert (await get(one, f"/v1/batches/{batch['id']}"))["status"] == "in_progress"
        finally:
            s3.thaw()
        assert {(await task).status for task in uploads} <= {200, 503}
        batch = await ended(one, batch)
        assert batch["request_counts"]["completed"] == GROUP_LINES * 3
        assert await answers(one, batch["output_file_id"]) == [*range(GROUP_LINES * 3)]
        forgets(one, "batch_paused", "batch_bucket_unavailable")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_kib() -> int:
    """The most memory that this process has had since the peak was forgotten."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1])


async def test_a_large_upload_takes_little_memory(batches: dict[str, Any], backend: ScriptedBackend) -> None:
    piece, count = b"x" * 1000000, 150
    around = form(b"|").split(b"|")
    size_bytes = len(piece) * count + sum(map(len, around))
    async with gateways(batches | {"max_file_bytes": 150000000}, backend) as (one,):
        head = request(b"", FORM, target=FILES).replace(b"length: 0", b"length: %d" % size_bytes)
        forget_peak()
        before = peak_kib()
        async with await Client.connect(one.port) as client:
            for sent in (head + around[0], *[piece] * count, around[1]):
                await client.send(sent)
            file = (await client.answer(60.0)).json
        assert file["bytes"] == len(piece) * count
        assert peak_kib() - before < 65536


async def test_a_client_that_leaves_or_sends_too_much_leaves_no_file(
    s3: S3Server, batches: dict[str, Any], backend: ScriptedBackend
) -> None:
    async with gateways(batches | {"max_file_bytes": 20000000}, backend) as (one,):
        assert (await upload(one, b"x" * 20000100)).status == 413
        client = await Client.connect(one.port)
        await client.send(request(form(b"x" * 15000000), FORM, target=FILES)[:-1000])
        client.reset()
        await holds(lambda: one.outcomes.get("client_gone") == 1, "it has left")
        assert (await get(one, "/v1/files"))["data"] == []
        await holds(
            lambda: one.gateway.features["batches"].batches.files.size_bytes == 0, "what it sent counts no more"
        )
