"""Uploads that are too large, cut off or malformed; a full disk; and what large files cost the event loop."""

import asyncio
import resource
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.clients import Answer, Client, request
from tests.fault.rig import LoopLag, UnderTest, holds, running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import echo

FORM = b"content-type: multipart/form-data; boundary=b"
FILES = b"/v1/files"
CHAT = "/v1/chat/completions"


@pytest.fixture
async def gateway(backend: ScriptedBackend, tmp_path: Path) -> AsyncIterator[UnderTest]:
    """A gateway with batches and small limits."""
    limits = {"path": str(tmp_path), "max_file_bytes": 20000000, "max_bytes_per_key": 30000000}
    async with running(backend, sections={"batches": limits}) as one:
        yield one


def form(content: bytes, purpose: bytes = b"batch") -> bytes:
    head = b'--b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    file = head % (b"file", b'; filename="a.jsonl"', content)
    return head % (b"purpose", b"", purpose) + file + b"--b--\r\n"


def lines(count: int, text: str = "") -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text or "Hello."}]}
    line = {"method": "POST", "url": CHAT, "body": body}
    return b"\n".join(orjson.dumps({"custom_id": str(number), **line}) for number in range(count))


async def upload(gateway: UnderTest, content: bytes) -> Answer:
    return await gateway.ask(form(content), FORM, target=FILES)


async def batch_of(gateway: UnderTest, content: bytes) -> dict[str, Any]:
    """Upload, and start a batch."""
    file = (await upload(gateway, content)).json
    wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "1h"}
    created: dict[str, Any] = (await gateway.ask(orjson.dumps(wanted), target=b"/v1/batches")).json
    return created


async def get(gateway: UnderTest, target: str) -> Any:
    answer = await gateway.ask(b"", method=b"GET", target=target.encode())
    return answer.json if answer.headers and answer.header("content-type") == "application/json" else answer.body


async def ended(gateway: UnderTest, batch: dict[str, Any]) -> dict[str, Any]:
    while (batch := await get(gateway, f"/v1/batches/{batch['id']}"))["status"] in ("validating", "in_progress",
                                                                                   "finalizing"):  # fmt: skip
        await asyncio.sleep(0.02)
    return batch


def kept(folder: Path) -> list[str]:
    return [path.name for path in (folder / "files").iterdir()]


async def test_a_file_over_the_limit_is_refused_while_it_arrives(gateway: UnderTest, tmp_path: Path) -> None:
    async with await Client.connect(gateway.port) as client:
        await client.send(request(b"", FORM, target=FILES).replace(b"length: 0", b"length: 200000000"))
        await client.send(form(b"x" * 20000100)[:-9])
        answer = await client.answer()
    assert (answer.status, answer.error["param"]) == (413, "file")
    await holds(lambda: not kept(tmp_path), "nothing is kept")


async def test_the_files_of_a_key_have_a_limit_which_deleting_makes_room_in(gateway: UnderTest, tmp_path: Path) -> None:
    first = await upload(gateway, b"x" * 19000000)
    assert first.status == 200
    assert (await upload(gateway, b"x" * 19000000)).status == 413
    assert (await gateway.ask(b"", method=b"DELETE", target=b"/v1/files/" + first.json["id"].encode())).status == 200
    assert (await upload(gateway, b"x" * 19000000)).status == 200
    assert len(kept(tmp_path)) == 1


async def test_files_that_arrive_at_the_same_time_share_the_limit(gateway: UnderTest, tmp_path: Path) -> None:
    found = await asyncio.gather(*(upload(gateway, b"x" * 16000000) for _ in range(2)))
    assert 413 in [each.status for each in found]
    assert len(kept(tmp_path)) == [each.status for each in found].count(200)


async def test_a_client_that_leaves_leaves_no_file(gateway: UnderTest, tmp_path: Path) -> None:
    client = await Client.connect(gateway.port)
    await client.send(request(form(b"x" * 5000000), FORM, target=FILES)[:-1000])
    await holds(lambda: kept(tmp_path) != [], "the upload has begun")
    client.reset()
    await holds(lambda: kept(tmp_path) == [], "nothing is kept")


@pytest.mark.parametrize(
    ("body", "header", "status"),
    [
        (form(b"{}", b"fine-tune"), FORM, 400),
        (form(b"{}")[:-6], FORM, 400),
        (b"{}", b"content-type: application/json", 400),
        (form(b"{}").replace(b'name="file"', b'name="other"'), FORM, 400),
        (form(b"{}").replace(b'name="purpose"', b'name="purpos"'), FORM, 400),
        (form(b""), FORM, 200),
    ],
)
async def test_a_malformed_upload(gateway: UnderTest, tmp_path: Path, body: bytes, header: bytes, status: int) -> None:
    assert (await gateway.ask(body, header, target=FILES)).status == status
    await holds(lambda: len(kept(tmp_path)) == (status == 200), "only a good upload is kept")


@pytest.mark.parametrize("content", [b"\0" * 1000000, b"x" * 19000000, b"[" * 1000000, b"\n" * 1000000, b'{"a":' * 500])
async def test_a_hostile_file_fails_its_batch_and_costs_the_loop_nothing(gateway: UnderTest, content: bytes) -> None:
    async with LoopLag() as lag:
        batch = await ended(gateway, await batch_of(gateway, content))
    assert batch["status"] == "failed"
    assert batch["errors"]["data"]
    assert lag.longest_seconds < 0.05


async def test_a_large_file_is_checked_and_run_in_little_memory(gateway: UnderTest, backend: ScriptedBackend) -> None:
    backend.plays(*echo())
    content = lines(2000, "x" * 8000)
    batch = await batch_of(gateway, content)
    gateway.counted.accepted += 2000  # each line has an outcome, too
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batch = await ended(gateway, batch)
    assert batch["request_counts"] == {"total": 2000, "completed": 2000, "failed": 0}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 65536  # KiB


async def test_without_a_folder_there_are_no_batches(backend: ScriptedBackend) -> None:
    async with running(backend) as off:
        assert (await upload(off, b"{}")).status == 404
        assert (await off.ask(b"", method=b"GET", target=b"/v1/batches")).status == 404


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


async def test_on_a_full_disk_batches_pause_and_go_on_when_there_is_room(
    small_disk: Path, backend: ScriptedBackend
) -> None:
    backend.plays(*echo())
    async with running(backend, sections={"batches": {"path": str(small_disk)}}) as gateway:
        batch = await batch_of(gateway, lines(300, "x" * 2000))
        gateway.counted.accepted += 300  # each line has an outcome, too
        while "paused" not in (found := await get(gateway, f"/v1/batches/{batch['id']}")):
            assert found["status"] in ("validating", "in_progress")
            await asyncio.sleep(0.05)
        assert found["paused"] == "no space is left on the disk"
        refused = await upload(gateway, b"x" * 1000000)
        assert (refused.status, refused.error["code"]) == (503, "storage_full")
        subprocess.run(["mount", "-o", "remount,size=32m", small_disk], check=True)
        batch = await ended(gateway, batch)
        assert batch["status"] == "completed"
        assert "paused" not in batch
        answers = (await get(gateway, f"/v1/files/{batch['output_file_id']}/content")).splitlines()
        assert sorted(int(orjson.loads(line)["custom_id"]) for line in answers) == [*range(300)]
        assert [event["event"] for event in gateway.events if event["event"] == "batch_paused"]
        gateway.events = [event for event in gateway.events if event["event"] != "batch_paused"]
