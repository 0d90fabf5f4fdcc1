"""Turns and comparisons made to order."""

from collections.abc import Sequence

from loadtest.compare.schema import Added, ArmFigures, ArmInfo, ArmRun, Comparison, Overhead, Setup
from loadtest.report.schema import Environment

ENVIRONMENT = Environment(
    versions={"loadtest": "0.1.0"},
    command=["loadtest", "compare", "-c", "8"],
    started_at="2026-01-02T03:04:05+00:00",
    host={"system": "Linux 6.1", "machine": "x86_64", "cpu": "test CPU", "cpus": 2, "memory_bytes": 8 * 2**30},
    server={},
)
SETUP = Setup(
    engines="2 x simulated engine", engine_count=2, model="small", load="chat · closed loop", owned=True, plan={}
)


def make_figures(**changes: object) -> ArmFigures:
    figures = ArmFigures(
        requests=100,
        failed={},
        first_error="",
        hit_ratio=0.5,
        requests_per_second=10.0,
        output_tokens_per_second=1000.0,
        attainment=None,
        ttft_p50=50.0,
        ttft_p99=200.0,
        tpot_p50=5.0,
        e2e_p50=300.0,
        e2e_p99=900.0,
        least_share=0.9,
        peak_running=[4.0, 5.0],
        preemptions=0.0,
        cpu_us_per_request=500.0,
        cpu_us_per_event=25.0,
        memory_mib=60.0,
        ttft_ms=[40.0, 50.0, 200.0],
    )
    return figures.model_copy(update=changes)


def make_turn(arm: str, repetition: int = 0, *, figures: ArmFigures | None = None, **changes: object) -> ArmRun:
    turn = ArmRun(
        arm=arm,
        repetition=repetition,
        folder=f"{arm}-{repetition + 1}",
        seconds=10.0,
        overhead=Overhead(added=Added(pairs=20, direct_p50=5.0, p50=0.5, p99=3.0)),
        figures=figures or make_figures(),
        passes_salt=True,
    )
    return turn.model_copy(update=changes)


def make_comparison(turns: Sequence[ArmRun], missing: dict[str, str] | None = None) -> Comparison:
    names = list(dict.fromkeys(turn.arm for turn in turns))
    arms = [ArmInfo(name=name, policy="some policy", version="1.2") for name in names]
    arms += [ArmInfo(name=name, policy="", version="", missing=why) for name, why in (missing or {}).items()]
    return Comparison(environment=ENVIRONMENT, setup=SETUP, arms=arms, turns=list(turns), passed=True, reasons=[])
