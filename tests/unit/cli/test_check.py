import io
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from gateway.cli.check import Report, examine, fleet_warnings, report_on
from gateway.cli.pages import page
from gateway.config import Config, HealthConfig, UpstreamConfig
from gateway.config.file import parse
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts, KvEventSource, ModelCard
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.probe import Answers
from gateway.core.backends.settings import BackendConfig
from gateway.core.backends.vllm_api import ControlError
from tests.unit.backends.scripted import Scripted, hang, json_answer
from tests.unit.backends.test_vllm_api import closed_port

GOOD = Facts(
    version="0.32.0",
    models=(ModelCard("m", max_model_len=4096),),
    block_size_tokens=16,
    kv_cache_tokens=100000,
    prefix_caching=True,
    max_num_seqs=64,
    kv_event_sources=(),
)


def answered(facts: Facts, name: str = "a", **settings: object) -> Answers:
    config = BackendConfig.model_validate({"url": "http://h:1", "name": name, **settings})
    backend = Backend(0, config, health=HealthConfig(), random=Random(1))
    backend.learn(facts)
    return Answers(backend, is_vllm=True)


def config_for(*urls: str, **sections: object) -> Config:
    return Config.model_validate({"backends": [{"url": url} for url in urls or ("http://h:1",)], **sections})


def shown(reports: list[Report], warnings: list[str] | None = None) -> str:
    """The page for a terminal."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(page("check.jinja", {"backends": reports, "warnings": warnings or []}))
    return console.export_text()


def warnings_about(facts: Facts) -> str:
    return " ".join(report_on(answered(facts), "prefix")["warnings"])


def test_nothing_is_said_about_a_good_backend() -> None:
    report = report_on(answered(GOOD), "prefix")
    assert report["warnings"] == []
    assert (report["cap"], report["cap_from"]) == (64, "/server_info")
    assert (report["kv_cache_tokens"], report["kv_cache_tokens_from"]) == (100000, "/metrics")
    assert (report["routing"], report["routing_because"]) == ("prefix", "prefix caching is on")
    assert report["kv_events"] == "off"


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (replace(GOOD, prefix_caching=False), "Prefix caching is off"),
        (replace(GOOD, version="0.21.3"), "below 0.22"),
        (replace(GOOD, can_admin=True), "Development endpoints"),
        (replace(GOOD, max_num_seqs=None), "set max_in_flight"),
        (replace(GOOD, models=()), "no model"),
    ],
)
def test_what_is_to_be_mended_is_said(facts: Facts, word: str) -> None:
    assert word in warnings_about(facts)


@pytest.mark.parametrize("version", ["0.22.0", "0.100.1", "1.0", "0.32.1.dev5+gabc", "unknown"])
def test_versions_from_the_floor_on_are_fine(version: str) -> None:
    assert "below" not in warnings_about(replace(GOOD, version=version))


def test_a_wrong_key_is_named() -> None:
    answers = answered(replace(GOOD, models=()))
    answers.problems["/v1/models"] = ControlError("/v1/models returned 401", 401)
    report = report_on(answers, "prefix")
    assert "set api_key" in report["warnings"][0]
    assert report["routing"] == "none"


def test_where_the_numbers_come_from_is_said() -> None:
    report = report_on(answered(GOOD, max_in_flight=8, kv_cache_tokens=10), "prefix")
    assert (report["cap"], report["cap_from"], report["kv_cache_tokens_from"]) == (
        8,
        "max_in_flight",
        "kv_cache_tokens",
    )
    ranks = report_on(answered(replace(GOOD, engines=4)), "prefix")
    assert (ranks["cap"], ranks["cap_from"]) == (256, "/server_info x 4 ranks")
    unknown = report_on(answered(replace(GOOD, max_num_seqs=None, kv_cache_tokens=None)), "prefix")
    assert (unknown["cap"], unknown["cap_from"], unknown["kv_cache_tokens_from"]) == (256, "default 256", "unknown")


@pytest.mark.parametrize(
    ("facts", "policy", "routing"),
    [
        (replace(GOOD, prefix_caching=False), "prefix", "prefix: by load only: prefix caching is off"),
        (replace(GOOD, prefix_caching=None), "prefix", "prefix: assumed: /metrics does not expose"),
        (GOOD, "round_robin", "round_robin: set by routing.policy"),
    ],
)
def test_the_routing_follows_from_policy_and_cache(facts: Facts, policy: str, routing: str) -> None:
    report = report_on(answered(facts), policy)
    assert ": ".join((report["routing"], report["routing_because"])).startswith(routing)


def test_no_number_is_made_up_for_a_backend_that_was_not_reached() -> None:
    silent = answered(Facts())
    silent.probe = ProbeResult.REFUSED
    configured = answered(Facts(), "b", max_in_flight=8, kv_cache_tokens=2000)
    configured.probe = ProbeResult.REFUSED
    reports = [report_on(silent, "prefix"), report_on(configured, "prefix")]
    assert [(report["cap"], report["cap_from"]) for report in reports] == [(None, "unknown"), (8, "max_in_flight")]
    assert reports[1]["kv_cache_tokens"] == 2000


def test_a_backend_that_is_down_is_one_line_with_the_reason_and_no_advice() -> None:
    silent = answered(Facts())
    silent.probe, silent.probe_error = ProbeResult.REFUSED, "connection refused"
    assert shown([report_on(silent, "prefix")]).splitlines() == ["✗ a (http://h:1): not reachable: connection refused."]
    both = shown([report_on(silent, "prefix"), report_on(answered(GOOD, "b"), "prefix")])
    assert "b" in re.split(" {2,}", both.splitlines()[2].strip())  # the table has the other one alone


def test_a_server_that_is_no_engine_is_named_as_such() -> None:
    page = answered(Facts())
    page.is_vllm = False
    page.problems = {path: ControlError(f"{path} returned 404", 404) for path in ("/v1/models", "/metrics")}
    report = report_on(page, "prefix")
    assert (report["reachable"], report["is_engine"]) == (True, False)
    assert "no vLLM server: /v1/models returned 404; /metrics returned 404." in shown([report])
    page.problems["/v1/models"] = ControlError("/v1/models returned 401", 401)  # an engine that wants its key
    assert report_on(page, "prefix")["is_engine"] is True


def test_an_encoder_gets_no_advice_on_prefix_caching() -> None:
    encoder = answered(replace(GOOD, prefix_caching=False, kv_cache_tokens=None))
    encoder.generates = False
    report = report_on(encoder, "prefix")
    assert report["warnings"] == []
    assert report["routing_because"] == "by load only: the model generates no text"
    text = shown([report])
    assert "--enable-prompt-tokens-details" not in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert {"generates text no", "KV cache none"} <= {*rows}


def test_an_alias_of_a_model_that_no_backend_lists_is_a_warning() -> None:
    config = config_for(models={"aliases": {"gpt-4o": "m", "gpt-5": "n"}})
    [warning] = fleet_warnings(config, [report_on(answered(GOOD), "prefix")])
    assert "'gpt-5' is an alias of 'n'" in warning
    assert fleet_warnings(config, [report_on(answered(Facts()), "prefix")]) == []  # nothing is known


ZMQ = KvEventSource(0, "zmq", "tcp://*:5557", replay_endpoint=None, topic="")


@pytest.mark.parametrize(
    ("sources", "settings", "shown"),
    [
        ((ZMQ,), {}, "tcp://h:5557"),
        ((ZMQ,), {"kv_events": "off"}, "off"),
        ((), {}, "off"),
        (None, {}, "not offered"),
        ((replace(ZMQ, endpoint="ipc:///x"),), {}, "not readable"),
        (None, {"kv_events": {"endpoint": "tcp://*:7", "bind": True}}, "tcp://*:7 (listening)"),
    ],
)
def test_kv_event_endpoints_are_shown(
    sources: tuple[KvEventSource, ...] | None, settings: dict[str, object], shown: str
) -> None:
    assert report_on(answered(replace(GOOD, kv_event_sources=sources), **settings), "prefix")["kv_events"] == shown


def test_the_source_of_cache_contents_is_shown_with_its_reason() -> None:
    def known(policy: str = "prefix", unreachable: str = "", tokenized: str = "", **facts: Any) -> tuple[str, str]:
        answers = answered(replace(GOOD, **facts))
        report = report_on(answers, policy, frozenset({tokenized}), unreachable or None)
        return report["knowledge"], report["knowledge_because"]

    events = {"kv_event_sources": (ZMQ,)}
    assert known() == ("own record", "the backend publishes no KV events (vLLM: --kv-events-config)")
    assert known(kv_event_sources=None) == ("own record", "the backend has no /kv_event_sources")
    assert known(**events, unreachable="no answer") == ("own record", "no answer")
    assert known(**events, tokenized="m") == ("exact blocks", "reported by its KV events")
    corrected, advice = known(**events, tokenized="another")
    assert corrected == "own record, corrected by KV events"
    assert "models.<name>.tokenizer" in advice
    assert known("round_robin", **events)[0] == "none"
    assert known(**events, prefix_caching=False)[0] == "none"


def test_events_that_cannot_be_read_are_a_warning() -> None:
    answers = answered(replace(GOOD, kv_event_sources=(ZMQ,)))
    [warning] = report_on(answers, "prefix", events_unreachable="tcp://h:5557: connection refused")["warnings"]
    assert warning == "KV events cannot be read: tcp://h:5557: connection refused."
    assert "ipc:///x is not a network endpoint" in warnings_about(
        replace(GOOD, kv_event_sources=(replace(ZMQ, endpoint="ipc:///x"),))
    )


def test_differences_between_backends_are_warnings() -> None:
    reports = [
        report_on(answered(GOOD, "a"), "prefix"),
        report_on(
            answered(
                replace(GOOD, version="0.31.0", models=(ModelCard("m", max_model_len=2048), ModelCard("other"))), "b"
            ),
            "prefix",
        ),
    ]
    text = " ".join(fleet_warnings(config_for(), reports))
    for word in ("different models", "2048, 4096", "different versions"):
        assert word in text
    assert fleet_warnings(config_for(), reports[:1]) == []


def test_a_keep_alive_as_long_as_the_backends_is_a_warning() -> None:
    config = config_for(upstream=UpstreamConfig(keep_alive_seconds=5.0).model_dump())
    assert "keep_alive_seconds" in fleet_warnings(config, [])[0]


async def test_a_fleet_is_examined_whatever_state_its_backends_are_in() -> None:
    async with Scripted() as good, Scripted() as strange, Scripted() as hanging:
        strange.answers.update({"/metrics": json_answer({}), "/v1/models": json_answer([]), "/version": json_answer(7)})
        hanging.answers["/health"] = hang
        config = config_for(
            good.url,
            strange.url,
            hanging.url,
            f"http://127.0.0.1:{closed_port()}",
            health={"probe_timeout_seconds": 0.5},
        )
        reports = (await examine(config))["backends"]
    assert [report["reachable"] for report in reports] == [True, True, False, False]
    assert reports[0]["models"] == ["m"]
    assert reports[0]["warnings"] == ["max_num_seqs is not visible: set max_in_flight to vLLM's --max-num-seqs."]
    assert reports[1]["models"] == []
    assert [report["is_engine"] for report in reports] == [True, False, False, False]
    assert "not a JSON object" in reports[1]["warnings"][0]
    assert reports[2]["routing_because"] == "/health timed out"
    assert reports[3]["routing_because"] == "connection refused"


def test_the_table_shows_every_backend_its_warnings_and_the_hint_on_cached_tokens() -> None:
    reports = [
        report_on(answered(GOOD, "a"), "prefix"),
        report_on(answered(replace(GOOD, version="0.9"), "b"), "prefix"),
    ]
    text = shown(reports, ["The backends differ."])
    for word in ("100,000 tokens", "64 sequences (/server_info)", "! b: Version 0.9", "--enable-prompt-tokens-details"):
        assert word in text
    assert "! The backends differ." in text
    for row in ("URL http://h:1 http://h:1", "generates text ? ?", "version 0.32.0 0.9", "models m m",
                "max_model_len m: 4096 m: 4096", "block size 16 tokens 16 tokens", "prefix caching on on",
                "KV events off off", "routing prefix: prefix caching is on prefix: prefix caching is on"):  # fmt: skip
        assert row in [" ".join(line.split()) for line in text.splitlines()]


def test_the_table_shows_what_is_not_known() -> None:
    rows = [" ".join(line.split()) for line in shown([report_on(answered(Facts()), "prefix")]).splitlines()]
    for row in ("version ?", "models none", "max_model_len ?", "block size ?", "KV cache ?", "prefix caching ?",
                "KV events not offered"):  # fmt: skip
        assert row in rows


async def test_discovered_backends_are_examined_and_sources_that_fail_are_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "backends.yaml"
    file.write_text("- {url: http://127.0.0.1:9, name: found}\n")
    document = await examine(parse({"discovery": {"file": str(file)}}))
    assert [report["name"] for report in document["backends"]] == ["found"]
    file.unlink()
    document = await examine(parse({"discovery": {"file": str(file)}}))
    assert document["backends"] == []
    assert "No such file" in document["warnings"][0]


async def test_a_database_that_cannot_be_used_is_warned_of_without_its_password() -> None:
    for needed in ("psycopg_pool", "obstore"):
        pytest.importorskip(needed)
    database = f"postgresql://u:pass@127.0.0.1:{closed_port()}/d"
    batches = {"path": "s3://bucket", "database": database}
    document = await examine(config_for(f"http://127.0.0.1:{closed_port()}", batches=batches))
    [warning] = document["warnings"]
    assert warning.startswith("batches.database cannot be used: connection failed")
    assert "pass" not in warning
