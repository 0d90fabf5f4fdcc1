"""A run through the gateway, its checkpoint, and what `loadtest verify` finds when something is changed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from loadtest.checkpoint.document import Checkpoint, Role, Status
from tests.integration.conftest import whole_fleet_is_up
from tests.integration.fleet import CHAT_MODEL, EMBEDDING_MODEL, Fleet
from tests.integration.gateway_process import Gateway, config_for, running_gateway

SECRET = "sk-checkpoint-secret"


def loadtest(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command as users run it."""
    return subprocess.run([sys.executable, "-m", "loadtest", *arguments], capture_output=True, text=True, check=False)


def run(url: str, out: Path, *options: str) -> Checkpoint:
    """A short run and its checkpoint."""
    shape = [
        "--model",
        CHAT_MODEL,
        "--prefix-tokens",
        "60",
        "--tail-tokens",
        "10",
        "--max-tokens",
        "6",
        "--output-spread",
        "0",
    ]
    ran = loadtest("run", url, "-c", "3", "-n", "12", *shape, "--api-key", SECRET, "--out", str(out), *options)
    assert (out / "checkpoint.json").exists(), ran.stdout + ran.stderr
    made = Checkpoint.model_validate_json((out / "checkpoint.json").read_bytes())
    # A machine that is busy makes a run invalid, rightly; no check hangs on that.
    assert ran.returncode == (0 if made.passed else 1), ran.stdout + ran.stderr
    assert all("lag p99" in reason or "of a core" in reason for reason in made.summary.reasons), ran.stdout
    return made


@pytest.fixture(scope="module")
def gateway(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One of their own: what it learns of these prompts would mislead where predictions are judged."""
    with running_gateway(tmp_path_factory.mktemp("gateway"), config_for(fleet, {}, {})) as running:
        yield running


@pytest.fixture
async def kept(gateway: Gateway, fleet: Fleet, tmp_path: Path) -> Path:
    """The folder of a run through the gateway."""

    await whole_fleet_is_up(gateway, fleet)
    run(gateway.url, tmp_path / "run")
    return tmp_path / "run"


async def test_a_run_through_the_gateway_is_verified_and_holds(kept: Path, fleet: Fleet) -> None:
    text = (kept / "checkpoint.json").read_text()
    made = Checkpoint.model_validate_json(text)
    assert {check.name: check.status for check in made.checks if check.status is not Status.OK} == {}
    names = {check.name for check in made.checks}
    assert {f"greedy answer of {CHAT_MODEL}", f"end of streams of {CHAT_MODEL}", "usage sums"} <= names
    assert f"embeddings of {EMBEDDING_MODEL}" in names
    assert any(name.startswith("cap of ") for name in names)
    assert {server.url for server in made.servers if server.role is Role.ENGINE} == set(fleet.urls)
    for server in made.servers:
        assert server.process is not None, server.process_unknown
        assert str(urlsplit(server.url).port) in " ".join(server.process.command) or server.role is Role.GATEWAY
    assert SECRET not in text + (kept / "checkpoint.md").read_text()
    verified = loadtest("verify", str(kept), "--api-key", SECRET)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "all that was checked holds" in verified.stdout


async def test_what_is_changed_afterwards_is_named(kept: Path) -> None:
    lines = (kept / "requests.jsonl").read_text().splitlines()
    changed = json.dumps(json.loads(lines[4]) | {"completion_tokens": 600})
    (kept / "requests.jsonl").write_text("\n".join([*lines[:4], changed, *lines[5:]]) + "\n")
    verified = loadtest("verify", str(kept), "--offline")
    assert verified.returncode == 1
    assert "FAILED       sha256 of requests.jsonl" in verified.stdout
    assert "1 thing not as it should be" in verified.stdout


async def test_an_engine_that_was_exchanged_is_named(kept: Path, fleet: Fleet) -> None:
    exchanged = urlsplit(fleet.chat_urls[0]).netloc
    verified = loadtest("verify", str(kept), "--targets", f"{exchanged}={fleet.embedding_url}")
    assert verified.returncode == 1
    assert f"FAILED       models of {exchanged}: expected [0].id {CHAT_MODEL}" in verified.stdout
    assert f"FAILED       command of {exchanged}" in verified.stdout
    assert f"FAILED       models of {urlsplit(fleet.chat_urls[1]).netloc}" not in verified.stdout


async def test_an_engine_alone_is_verified_against_itself(fleet: Fleet, tmp_path: Path) -> None:
    made = run(fleet.chat_urls[0], tmp_path)
    told = {check.name: check.status for check in made.checks}
    assert Status.FAILED not in told.values()
    assert told[f"greedy answer of {CHAT_MODEL}"] is told["usage sums"] is Status.OK
    assert told["caps held"] is Status.NOT_CHECKED
