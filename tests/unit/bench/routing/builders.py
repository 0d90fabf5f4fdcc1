"""Figures, turns and results of a routing comparison, made to order."""

from loadtest.report.schema import Distribution
from tests.bench.routing.results import Fidelity, Figures, Recovery, RoutingResults, Setup, Turn
from tests.unit.bench.builders import MACHINE

SETUP = Setup(
    engines="2 x simulated engines",
    model="tiny",
    kv_tokens=4096,
    block_tokens=32,
    max_num_seqs=8,
    kv_events=False,
    trace="some.jsonl",
    rows=10,
    prompt_tokens=1000,
    output_tokens=100,
    ideal_hit_ratio=0.5,
    requests_per_second=7.0,
    capacity=10.0,
    endpoint="completions",
    fault="",
)


def spread(mean: float, p50: float | None = None, p99: float | None = None) -> Distribution:
    """A distribution around a mean."""
    return Distribution(count=10, mean=mean, p50=p50 or mean, p90=mean, p95=mean, p99=p99 or mean, max=p99 or mean)


def figures(
    ttft: float = 100,
    hit_ratio: float = 0.5,
    failed: dict[str, int] | None = None,
    fidelity: Fidelity | None = None,
    recovery: Recovery | None = None,
    wrong_lengths: int = 0,
    late_ms: float = 1.0,
    others_share: float = 0.0,
) -> Figures:
    """One arm's, once; all is well unless told otherwise."""
    return Figures(
        requests=10,
        failed=failed or {},
        first_error="http_503: no" if failed else "",
        seconds=5,
        hit_ratio=hit_ratio,
        prompt_tokens=1000,
        preemptions=0,
        least_share=0.9,
        output_tokens_per_second=20,
        ttft=spread(ttft),
        tpot=spread(10),
        e2e=spread(ttft + 200),
        wrong_lengths=wrong_lengths,
        late_ms=late_ms,
        router_cpu_ms=0.2,
        others_share=others_share,
        fidelity=fidelity,
        recovery=recovery,
    )


def fidelity(error: float) -> Fidelity:
    """Predictions that were that far off, all too high."""
    return Fidelity(requests=10, error=error, over=error, under=0, error_a_request=error)


def turn(repetition: int, found: Figures | None, failure: str = "") -> Turn:
    """One arm, once."""
    latencies = tuple(float(value) for value in range(1, 11)) if found else ()
    return Turn(repetition=repetition, figures=found, ttft_ms=latencies, e2e_ms=latencies, failure=failure)


def results(turns: dict[str, list[Turn]]) -> RoutingResults:
    """A run."""
    labels = {name: name.replace("gateway-", "gateway, ") for name in turns}
    return RoutingResults(machine=MACHINE, versions={"gateway": "1.0"}, labels=labels, setup=SETUP, turns=turns)
