"""Runs that were never made, and servers that were never asked."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from loadtest.checkpoint.document import Role, ServerInfo
from loadtest.checkpoint.machine import environment
from loadtest.drive.plan import Plan
from loadtest.drive.record import Harvest, Record
from loadtest.report.schema import Bounds, PageSeries, Results, Samples
from loadtest.report.summarise import summarise
from loadtest.workloads.prompts import fingerprint
from loadtest.workloads.sources import source_of

ENGINE = ServerInfo(name="a", url="http://a:8000", role=Role.ENGINE, driven=False, named=True)
GATEWAY = ServerInfo(
    name="gateway",
    url="http://gw:8080",
    role=Role.GATEWAY,
    driven=True,
    named=True,
    backends=[{"name": "a", "url": "http://a:8000", "limit_upper": 2}],
)


def plan(**more: Any) -> Plan:
    """A closed loop of short prompts."""
    workload = {"groups": 2, "prefix_tokens": 40, "tail_tokens": 10, "max_tokens": 11, "seed": 7}
    fields = {"url": "http://gw:8080", "model": "m", "requests": 9, "concurrency": 2, "workload": workload}
    return Plan.model_validate(fields | more)


def record(made: Plan, index: int, start: float, **more: Any) -> Record:
    """A second long, its first token after 0.1 s, with the body that the plan says."""
    prompt = next(iter(source_of(made.workload).turns(index))).prompt
    fields: dict[str, Any] = {
        "index": index,
        "group": prompt.group,
        "intended": start,
        "sent": start,
        "first_token": start + 0.1,
        "end": start + 1.0,
        "outcome": "ok",
        "asked_tokens": 11,
        "prompt_tokens": 100,
        "completion_tokens": 11,
        "events": 11,
        "reads": 11,
        "backend": "a",
        "body_hash": fingerprint(made.body_maker().body(prompt)),
    }
    return Record(**(fields | more))


def page(name: str = "a", url: str = "http://a:8000/metrics", running: float = 2.0) -> PageSeries:
    """An engine's metrics, read once."""
    return PageSeries(
        name=name,
        url=url,
        at=[0.0],
        running=[running],
        waiting=[0.0],
        kv_cache_usage=[0.1],
        preemptions=[0.0],
        prefix_queries=[1.0],
        prefix_hits=[0.0],
    )


def results(
    made: Plan, records: list[Record], counted: dict[str, float] | None = None, pages: list[PageSeries] | None = None
) -> Results:
    """What they come to; the engine has counted what clients were reported, if nothing else is said."""
    if counted is None:
        good = [one for one in records if one.ok]
        counted = {
            'vllm:prompt_tokens_total{engine="0"}': float(sum(one.prompt_tokens or 0 for one in good)),
            'vllm:generation_tokens_total{engine="0"}': float(sum(one.completion_tokens or 0 for one in good)),
        }
    samples = Samples(gpus=[], no_gpu="none", pages=[page()] if pages is None else pages)
    where = environment(["loadtest", "run"], datetime(2026, 1, 1, tzinfo=UTC), {})
    return summarise(made, Harvest(records=records), Bounds(), where, counted, samples)
