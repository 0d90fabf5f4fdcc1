"""A run through a gateway, recorded from its access log, replayed, and compared with what the client measured."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.integration.fleet import CHAT_MODEL, Fleet
from tests.integration.gateway_process import config_for, running_gateway

pytestmark = [
    pytest.mark.alone,
    pytest.mark.simulated("engines that use every core leave the client none: its figures count for nothing then"),
]

REQUESTS = 40
ALONE = 24
SIZES = ("--model", CHAT_MODEL, "--max-tokens", "8", "--warmup", "0")
SHARED = ("-w", "shared-prefix", "--groups", "2", "--prefix-tokens", "512", "--tail-tokens", "64")


def loadtest(*arguments: str) -> None:
    """Runs it to its end. What it measured on a machine that is busy is invalid, and is predicted all the same."""
    ended = subprocess.run([sys.executable, "-m", "loadtest", *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 or " lag p99 " in ended.stdout, ended.stderr + ended.stdout


def predicted(log: Path, folder: Path) -> dict[str, Any]:
    results = str(folder / "judged" / "results.json")
    loadtest("predict", str(log), "--measured", results, "--block-size", "32", "--out", str(folder))
    document: dict[str, Any] = orjson.loads((folder / "prediction.json").read_bytes())
    return document


def test_a_recorded_run_is_predicted_from_its_log(fleet: Fleet, tmp_path: Path) -> None:
    pages = ",".join(f"engine-{number}={url}/metrics" for number, url in enumerate(fleet.chat_urls))
    with running_gateway(tmp_path, config_for(fleet, {"server": {"access_log_prefixes": True}}, {})) as gateway:
        alone = ("-w", "unique", "-c", "1", "-n", str(ALONE), "--out", str(tmp_path / "idle"))
        loadtest("run", gateway.url, *alone, *SIZES)
        judged = ("-r", "10", "-n", str(REQUESTS), "--metrics-url", pages, "--out", str(tmp_path / "judged"))
        loadtest("run", gateway.url, *judged, *SHARED, *SIZES)
    [log] = tmp_path.glob("gateway-*.log")
    document = predicted(log, tmp_path)
    assert document["judged"] == REQUESTS
    assert document["before"] > ALONE  # and what its checkpoint asked
    assert document["calibration"]["answers"] >= 20
    figures = {figure["name"]: figure for figure in document["figures"]}
    assert figures["hit rate"]["measured"] > 0.5
    assert abs(figures["hit rate"]["difference"]) < 10
    assert figures["TTFT p50"]["measured"] > 0
    assert figures["TTFT p50"]["predicted"] > 0
