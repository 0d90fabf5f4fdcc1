"""An engine is killed under load and comes back: the gateway loses what nobody could save, and nothing else."""

import sys
import time
from pathlib import Path
from subprocess import run
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import orjson
import pytest

from loadtest.compare.outage.run import Observed, OutageLoad, observe
from loadtest.compare.outage.schema import Fate, Fault, fate_of
from loadtest.compare.peers import ours
from loadtest.compare.proxy import Setting, started
from loadtest.compare.run import figures
from loadtest.drive.record import ERROR_OBJECT
from loadtest.servers.engines import EngineOptions, Engines, Kind, running_engines
from loadtest.servers.processes import free_ports
from loadtest.workloads.prompts import Endpoint

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.simulated("a real engine takes long to come back, and its figures on a CPU say nothing"),
]

OPTIONS = EngineOptions(Kind.SIM, 2, Path("simulated"))
# Patient enough for a machine that does something else meanwhile.
LOAD = OutageLoad(rate_per_second=8.0, seconds=18.0, max_tokens=200)
PATIENCE_SECONDS = 20.0
COMES_BACK_SECONDS = 40.0


def observed(engines: Engines, folder: Path, fault: Fault, patience_seconds: float) -> Observed:
    port, metrics_port = free_ports(2)
    setting = Setting(
        tuple(engines.urls),
        port,
        metrics_port=metrics_port,
        folder=folder,
        model=OPTIONS.model,
        max_num_seqs=OPTIONS.max_num_seqs,
    )
    plan = LOAD.plan(setting.url, Endpoint.CHAT, OPTIONS.model, 1)
    plan = plan.model_copy(update={"timeout_seconds": patience_seconds})
    with started(ours(), Path(), setting, folder / "log.err", Endpoint.CHAT):
        found = observe(engines, LOAD.outage(0, fault), plan)
        comes_back(setting.url, urlsplit(engines.urls[0]).netloc)
    return found


def comes_back(url: str, backend: str) -> None:
    """The gateway sends requests there again."""
    deadline = time.monotonic() + COMES_BACK_SECONDS
    asked = 0
    while asked_of(url, f"question {asked}") != backend:
        assert time.monotonic() < deadline
        asked += 1
        time.sleep(0.1)


def asked_of(url: str, question: str) -> str | None:
    body = orjson.dumps({"model": OPTIONS.model, "prompt": question, "max_tokens": 1})
    request = Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with build_opener(ProxyHandler({})).open(request, timeout=20.0) as answer:
        return answer.headers["x-gateway-backend"]


def test_of_an_engine_that_is_killed_only_answers_that_had_begun_are_lost(tmp_path: Path) -> None:
    with running_engines(OPTIONS, tmp_path / "engines") as engines:
        found = observed(engines, tmp_path, Fault.KILL, PATIENCE_SECONDS)
        killed = urlsplit(engines.urls[0]).netloc
    gone = found.moments.gone
    lost = [record for record in found.records if not record.ok]
    savable = [record for record in lost if fate_of(record, found.moments) is not Fate.BEGUN]
    assert [(record.outcome, record.sent - gone) for record in savable] == []
    assert {record.backend for record in lost} <= {killed}
    assert {record.shown_as for record in lost} <= {ERROR_OBJECT}
    # It was in use before, and nobody was sent there while it was away.
    assert any(record.backend == killed for record in found.records if record.sent < gone)
    away = [record for record in found.records if gone < record.sent < found.moments.let_back]
    assert away
    assert all(record.backend != killed for record in away)
    told = figures(found.records, found.moments, found.seen, 0)
    assert told.requests == len(found.records)
    assert told.steered_away_seconds == 0.0
    # What had reached the engine when it was killed, and had no byte yet, reached another one, too; nothing else did.
    in_flight = sum(record.sent < gone < record.end for record in found.records)
    assert told.requests <= told.reached_engines + 1
    assert told.reached_engines <= told.requests + in_flight + 1


def test_an_engine_that_hangs_takes_what_it_holds_and_little_more(tmp_path: Path) -> None:
    with running_engines(OPTIONS, tmp_path / "engines") as engines:
        found = observed(engines, tmp_path, Fault.HANG, LOAD.patience_seconds)
        hung = urlsplit(engines.urls[0]).netloc
    lost = [record for record in found.records if not record.ok]
    assert lost
    assert {record.backend for record in lost} <= {hung, None}  # without a byte there is no word of where it went


def test_the_command_tells_it_in_a_table_and_a_picture(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtest", "compare", "gateway", "--killed", "only", "--killed-seconds", "12"]
    ended = run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    document = orjson.loads((tmp_path / "compare.json").read_bytes())
    turns = document["killed"]["turns"]
    assert sorted((turn["arm"], turn["fault"]) for turn in turns) == [("gateway", "hang"), ("gateway", "kill")]
    assert document["turns"] == []
    for turn in turns:
        found = turn["figures"]
        assert sum(found["fates"].values()) == found["requests"] > 0
        assert sum(span["answered"] + span["lost"] for span in found["spans"]) == found["requests"]
    shown = (tmp_path / "compare.md").read_text()
    assert "One engine is killed and started again" in shown
    assert "gateway, engine hanging" in (tmp_path / "killed.svg").read_text()
    assert "killed and started again" in ended.stdout
