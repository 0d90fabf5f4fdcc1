"""The folder of batches on a file system that hangs: all else goes on, and the process ends when it should.

Opening a pipe that has no writer hangs in the kernel, as a file on a network that is gone does.
"""

import asyncio
import os
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import yaml

from tests.clients import Answer, Client, chat, request
from tests.fault.restartable import Restartable, restartable
from tests.fault.rig import holds
from tests.fault.test_batches import CHAT
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import echo

HANGING = 20  # more than the threads of the folder
REVOKED, KEPT = "sk-revoked", "sk-kept"
LINE = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": MODEL, "messages": []}}


def form(content: bytes) -> bytes:
    part = b'--limit\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    file = part % (b"file", b'; filename="input.jsonl"', content)
    return part % (b"purpose", b"", b"batch") + file + b"--limit--\r\n"


async def posts(gateway: Restartable, target: bytes, body: bytes, key: str = KEPT, **options: Any) -> Answer:
    return await gateway.ask(body, b"authorization: Bearer " + key.encode(), target=target, **options)


async def hangs(gateway: Restartable, file_id: str) -> Client:
    """A client that downloads a file which cannot be opened."""
    client = await gateway.client()
    key = b"authorization: Bearer " + KEPT.encode()
    target = b"/v1/files/%b/content" % file_id.encode()
    await client.send(request(b"", key, method=b"GET", target=target))
    return client


def key_names(file: Path, *keys: str) -> None:
    file.write_text(yaml.safe_dump([{"name": key[3:], "key_sha256": sha256(key.encode()).hexdigest()} for key in keys]))


async def test_a_folder_that_hangs_holds_up_batches_alone(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*echo())
    keys, folder = tmp_path / "keys.yaml", tmp_path / "batches"
    key_names(keys, REVOKED, KEPT)
    sections: dict[str, Any] = {
        "batches": {"path": str(folder)}, "auth": {"keys_file": str(keys)}, "server": {"drain_timeout_seconds": 0.5},
    }  # fmt: skip
    async with restartable(tmp_path, backend, **sections) as gateway:
        content_type = b"content-type: multipart/form-data; boundary=limit"
        key = b"authorization: Bearer " + KEPT.encode()
        uploaded = await gateway.ask(form(orjson.dumps(LINE)), content_type, key, target=b"/v1/files")
        assert uploaded.status == 200, uploaded.body
        path = folder / "files" / uploaded.json["id"]
        path.unlink()
        os.mkfifo(path)
        process = gateway.processes[0]
        before = threads_of(process.pid)
        clients = [await hangs(gateway, path.name) for _ in range(HANGING)]
        batch = {"input_file_id": path.name, "endpoint": CHAT, "completion_window": "24h"}
        assert (await posts(gateway, b"/v1/batches", orjson.dumps(batch))).status == 200

        await holds(lambda: threads_of(process.pid) >= before + 6, "the threads of the folder hang")
        assert (await posts(gateway, b"/v1/chat/completions", chat(), REVOKED)).status == 200
        assert (await gateway.asks_admin("/metrics", b"GET")).status == 200
        assert (await gateway.asks_admin("/admin/reload")).status == 200
        key_names(keys, KEPT)
        while (await posts(gateway, b"/v1/chat/completions", chat(), REVOKED)).status != 401:
            await asyncio.sleep(0.05)
        assert (await posts(gateway, b"/v1/chat/completions", chat())).status == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        [cut] = gateway.events("batches_cut")
        assert cut["level"] == "error"
        for client in clients:
            client.close()


def threads_of(pid: int) -> int:
    """How many threads a process has now."""
    return len([*Path(f"/proc/{pid}/task").iterdir()])
