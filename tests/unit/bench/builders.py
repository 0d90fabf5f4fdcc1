"""Peers, samples, turns and results made to order."""

from collections.abc import Callable
from pathlib import Path

from loadtest.compare.proxy import Peer, Setting
from tests.bench.results import Load, Machine, Percentiles, Results, Sample, Turn

MACHINE = Machine(
    cpu="test CPU", cores=2, memory_gib=8, kernel="6.1", python="CPython 3.11", quotable=True, date="2026-01-01"
)


def times(p50: float = 100, p99: float = 200) -> Percentiles:
    """Durations in microseconds."""
    return Percentiles(n=10, mean=p50, p50=p50, p90=p50, p99=p99, p999=p99, max=p99)


def make_sample(
    *,
    proxy_cpu_seconds: float = 1.0,
    requests: int = 10_000,
    events: int = 0,
    events_per_s: float = 25_000,
    paced_events_per_s: float | None = 25_000,
    latency_p50_us: float = 100,
    relay_p99_us: float = 200,
    errors: dict[str, int] | None = None,
    load_core_share: float = 0.5,
    others_share: float = 0.0,
    least_backend_share: float = 0.5,
    affinity: float = 1.0,
    refused: int = 0,
    refusal_p99_us: float = 200,
) -> Sample:
    """One sample; all is well unless told otherwise."""
    load = Load(
        seconds=3,
        requests=requests,
        events=events,
        requests_per_s=requests / 3,
        events_per_s=events_per_s,
        connections=32,
        in_flight=32,
        cpu_share=0.2,
        all_requests=requests,
        reconnects=0,
        errors=errors or {},
        first_error="lost: closed" if errors else "",
        latency_us=times(latency_p50_us),
        refused=refused,
        refusal_us=times(p99=refusal_p99_us),
        ttft_us=times(),
        ttft_added_us=times(),
        gap_us=times(),
        relay_us=times(p99=relay_p99_us),
    )
    return Sample(
        load=load,
        paced_events_per_s=paced_events_per_s,
        proxy_cpu_seconds=proxy_cpu_seconds,
        load_core_share=load_core_share,
        others_share=others_share,
        affinity=affinity,
        least_backend_share=least_backend_share,
    )


def make_results(turns: dict[str, list[Turn]]) -> Results:
    """A run of the scenarios that the turns have."""
    scenarios = {name: None for found in turns.values() for turn in found for name in turn.samples}
    versions = dict.fromkeys(turns, "1.0")
    return Results(machine=MACHINE, versions=versions, scenarios=list(scenarios), turns=turns)


def cpu_turn(cpu_us_per_request: float, memory_mib: float = 50, **more: object) -> Turn:
    """A turn of scenario a1 that cost this much."""
    sample = make_sample(proxy_cpu_seconds=cpu_us_per_request / 100, requests=10_000)
    return Turn(samples={"a1": sample.model_copy(update=more)}, memory_mib=memory_mib)


def make_peer(name: str, find: Callable[[Path], Path | None], *arguments: str, debian: str = "") -> Peer:
    """A proxy that is PROGRAM; `{port}` in its arguments is where it shall listen."""

    def filled_in(setting: Setting) -> list[str]:
        return [argument.replace("{port}", str(setting.port)) for argument in arguments]

    return Peer(name, policy="", find=find, arguments=filled_in, debian=debian)


def nowhere(peers_dir: Path) -> Path | None:
    """Where a program is that is not installed."""
    return None
