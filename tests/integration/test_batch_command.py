"""`gateway batch`: a file of requests at a running gateway, and without one; list, cancel, Ctrl-C."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.integration.conftest import engine_kind
from tests.integration.fleet import CHAT_MODEL, Fleet
from tests.integration.gateway_process import Gateway, config_for, running_gateway
from tests.integration.observed import eventually

KEY = "sk-batch"


@pytest.fixture(scope="module")
def gateway(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with batches and a key."""
    folder = tmp_path_factory.mktemp("gateway")
    sections = {"batches": {"path": str(folder / "batches")}, "auth": {"keys": [{"name": "a", "key": KEY}]}}
    with running_gateway(folder, config_for(fleet, sections, {})) as running:
        yield running


def requests(folder: Path, count: int, tokens: int = 4, **first: Any) -> Path:
    """An input file; `first` changes the first line's body."""
    file = folder / "in.jsonl"
    lines = []
    for number in range(count):
        body = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": f"{number}"}], "max_tokens": tokens}
        body |= first if not number else {}
        lines.append({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})
    file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return file


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "gateway", "batch", *map(str, words)]


async def ran(*words: object) -> tuple[int, str]:
    """Exit code and output."""
    done = await asyncio.to_thread(subprocess.run, command(*words), capture_output=True, check=False)
    return done.returncode, (done.stdout + done.stderr).decode()


def ids(file: Path) -> list[int]:
    return sorted(int(orjson.loads(line)["custom_id"]) for line in file.read_bytes().splitlines())


def left_in(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(folder.glob(pattern))


async def test_at_a_running_gateway(gateway: Gateway, tmp_path: Path) -> None:
    file, out = requests(tmp_path, 50), tmp_path / "out.jsonl"
    there = ("--url", gateway.url, "--api-key", KEY)
    code, text = await ran("run", file, "-o", out, *there)
    assert code == 0, text
    assert "50 of 50 requests answered" in text
    assert "200 output tokens" in text
    assert ids(out) == [*range(50)]
    code, text = await ran("list", *there)
    assert (code, "50/50 done, 0 failed" in text) == (0, True), text
    batch = text.split()[0]
    code, text = await ran("cancel", batch, *there)
    assert (code, "cannot be cancelled" in text) == (1, True), text
    code, text = await ran("list", "--url", gateway.url)
    assert (code, "API key" in text) == (1, True), text


async def test_without_a_running_gateway(fleet: Fleet, tmp_path: Path) -> None:
    file, out = requests(tmp_path, 50, temperature="hot"), tmp_path / "out.jsonl"
    backends = [word for url in fleet.chat_urls for word in ("--backend", url)]
    code, text = await ran("run", file, "-o", out, *backends)
    assert (code, "49 of 50 requests answered" in text) == (1, True), text
    assert ids(out) == [*range(1, 50)]
    assert ids(tmp_path / "out.errors.jsonl") == [0]
    assert [path.name for path in left_in(tmp_path)] == ["in.jsonl", "out.errors.jsonl", "out.jsonl"]


async def test_ctrl_c_without_a_running_gateway_writes_what_is_done(
    fleet: Fleet, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tokens = 50 if engine_kind(request.config) == "sim" else 4  # requests in flight end first
    file, out = requests(tmp_path, 5000, tokens=tokens), tmp_path / "out.jsonl"
    words = command("run", file, "-o", out, "--backend", fleet.chat_urls[0])

    async def some_are_done() -> bool:
        return any(b"batch_req_" in path.read_bytes()[:100] for path in left_in(tmp_path, ".gateway-batch-*/parts/*/*"))

    # A shell lets its background jobs ignore SIGINT, and their children inherit that.
    process = subprocess.Popen(["env", "--default-signal=INT", *words], stderr=subprocess.DEVNULL)
    try:
        await eventually(some_are_done, "answers are written")
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 100) == 130
    finally:
        process.kill()
    done, not_done = ids(out), ids(tmp_path / "out.errors.jsonl")
    assert done
    assert sorted(done + not_done) == [*range(5000)]
    assert left_in(tmp_path, ".gateway-batch-*") == []


async def test_a_file_that_cannot_be_run(gateway: Gateway, fleet: Fleet, tmp_path: Path) -> None:
    file, out = requests(tmp_path, 3), tmp_path / "out.jsonl"
    file.write_bytes(file.read_bytes() + b"{\n")
    code, text = await ran("run", file, "-o", out, "--url", gateway.url, "--api-key", KEY)
    assert (code, "line 4: The line is not a valid JSON object" in text) == (1, True), text
    code, text = await ran("run", file, "-o", out, "--url", gateway.url, "--backend", fleet.chat_urls[0])
    assert (code, "--url is for a running gateway" in text) == (2, True), text
    code, text = await ran("run", file, "-o", out, "--url", "http://127.0.0.1:1")
    assert (code, "is unreachable" in text) == (1, True), text
    file.write_bytes(b"{}\n")
    code, text = await ran("run", file, "-o", out, "--url", gateway.url)
    assert (code, "has no `url`" in text) == (1, True), text
