"""The comparison of arms as tables: medians with their range, and ours against each other arm."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loadtest.console import markdown_table
from loadtest.report.schema import Distribution
from tests.bench.routing.arms import ours
from tests.bench.routing.results import Fidelity, Figures, RoutingResults, Turn

OURS = ours("prefix").name
_FIDELITY_GOAL = 0.05
_LATE_MS = 25.0
_SHARED = 0.1


@dataclass(frozen=True)
class Column:
    """One figure of an arm."""

    title: str
    value: Callable[[Figures], float | None]
    digits: int = 0
    scale: float = 1.0
    higher_is_better: bool = False
    compared: bool = True


def _of(kind: str, figure: str) -> Callable[[Figures], float | None]:
    def read(figures: Figures) -> float | None:
        found: Distribution | None = getattr(figures, kind)
        return None if found is None else float(getattr(found, figure))

    return read


COLUMNS = [
    Column("hit rate, %", lambda f: f.hit_ratio, 1, 100, higher_is_better=True),
    Column("TTFT mean, ms", _of("ttft", "mean")),
    Column("p50", _of("ttft", "p50")),
    Column("p99", _of("ttft", "p99")),
    Column("TPOT mean, ms", _of("tpot", "mean"), 1),
    Column("E2E mean, ms", _of("e2e", "mean")),
    Column("E2E p99", _of("e2e", "p99")),
    Column("tokens/s", lambda f: f.output_tokens_per_second, higher_is_better=True),
    Column("failed", lambda f: sum(f.failed.values()), compared=False),
    Column("preempted", lambda f: f.preemptions, compared=False),
    Column("router CPU, ms a request", lambda f: f.router_cpu_ms, 2, compared=False),
    Column("least busy engine, %", lambda f: f.least_share, 0, 100, compared=False),
]


def figures_of(turns: Iterable[Turn]) -> list[Figures]:
    """Those of the repetitions that worked."""
    return [turn.figures for turn in turns if turn.figures is not None]


def _spread(values: list[float], digits: int) -> str:
    """The median, and the range if there is more than one."""
    if not values:
        return "-"
    shown = [f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return shown[0] if len(values) == 1 else f"{shown[0]} ({shown[1]}-{shown[2]})"


def table(results: RoutingResults) -> str:
    rows = []
    for name, turns in results.turns.items():
        label = f"**{results.labels[name]}**" if name == OURS else results.labels[name]
        found = figures_of(turns)
        cells = [
            _spread([value * column.scale for f in found if (value := column.value(f)) is not None], column.digits)
            for column in COLUMNS
        ]
        rows.append([label, *cells])
    return markdown_table(["arm", *(column.title for column in COLUMNS)], rows, texts=1)


def ratios(results: RoutingResults, other: str, column: Column) -> list[float]:
    """Ours over another arm's, repetition by repetition, so that what drifts hits both."""
    theirs = {turn.repetition: turn.figures for turn in results.turns[other]}
    found: list[float] = []
    for turn in results.turns.get(OURS, []):
        against = theirs.get(turn.repetition)
        if turn.figures is not None and against is not None:
            mine, other_value = column.value(turn.figures), column.value(against)
            if mine is not None and other_value:
                found.append(mine / other_value)
    return found


def ratio_table(results: RoutingResults) -> str:
    columns = [column for column in COLUMNS if column.compared]
    rows = [
        [results.labels[name], *(_spread(ratios(results, name, column), 2) for column in columns)]
        for name in results.turns
        if name != OURS
    ]
    return markdown_table([f"{results.labels[OURS]} / …", *map(_bare, columns)], rows, texts=1)


def _bare(column: Column) -> str:
    title = column.title.split(",")[0]
    title = f"TTFT {title}" if title.startswith("p") else title
    return f"{title} ↑" if column.higher_is_better else title


def fidelity_lines(results: RoutingResults) -> list[str]:
    """How well ours knew what the engines held, and what faults did to that."""
    lines: list[str] = []
    for name, turns in results.turns.items():
        found = figures_of(turns)
        known = [f.fidelity for f in found if f.fidelity is not None]
        if known:
            error = statistics.median(one.error for one in known)
            judged = "met" if error <= _FIDELITY_GOAL else "NOT met"
            lines.append(
                f"{results.labels[name]}: |predicted - actual| cached tokens are {_percents(known)} of the prompts' "
                f"tokens (too many {_median(known, 'over')}, too few {_median(known, 'under')}); "
                f"goal ≤ {_FIDELITY_GOAL:.0%}: {judged}."
            )
            lines.extend(_recoveries(results.labels[name], found))
    return lines


def _recoveries(label: str, found: list[Figures]) -> list[str]:
    told = [f.recovery for f in found if f.recovery is not None]
    if not told:
        return []
    names = list(dict.fromkeys(name for one in told for name in one.after))
    if not names:
        return [f"{label}: no request reached the engines that lost their caches again; a longer run (--limit) would."]
    parts = [f"before {_percents([one.before for one in told if one.before])}"]
    parts += [f"requests {name}: {_percents([e for one in told if (e := one.after.get(name))])}" for name in names]
    return [f"{label}, prediction error on the engines that lost their caches: " + ", ".join(parts) + "."]


def _percents(found: list[Fidelity]) -> str:
    return _spread([one.error * 100 for one in found], 1) + " %"


def _median(found: list[Fidelity], field: str) -> str:
    return f"{statistics.median(getattr(one, field) for one in found):.1%}"


def notes(results: RoutingResults) -> list[str]:
    """What a reader of the tables must know."""
    setup, machine = results.setup, results.machine
    repetitions = max((len(turns) for turns in results.turns.values()), default=0)
    pace = f"{setup.requests_per_second:.1f} requests/s"
    if setup.capacity is not None:
        pace += f", {setup.requests_per_second / setup.capacity:.0%} of the {setup.capacity:.1f} that the engines can"
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [
        f"{setup.engines}; model {setup.model}, {setup.kv_tokens:,} KV tokens in blocks of {setup.block_tokens} and at "
        f"most {setup.max_num_seqs} sequences each. {setup.rows} requests of {setup.trace} "
        f"({setup.prompt_tokens / setup.rows:.0f} tokens in, {setup.output_tokens / setup.rows:.0f} out on average), "
        f"open loop, {pace}; one engine with an endless cache would find {setup.ideal_hit_ratio:.1%}. "
        f"{_fault(setup.fault)}Caches are cold at the start of each arm. Hit rates are vLLM's own counters, latencies "
        "run from the moment a request was due.",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, Linux {machine.kernel}; {machine.date}; "
        f"{versions}. Medians (and range) of {repetitions} repetitions, arms in random order.",
    ]
    for name, turns in results.turns.items():
        lines.extend(_complaints(results.labels[name], turns))
    return lines


def _fault(fault: str) -> str:
    return f"{fault[0].upper()}{fault[1:]}. " if fault else ""


def _complaints(label: str, turns: list[Turn]) -> list[str]:
    lines = [f"{label}: {turn.failure}." for turn in turns if turn.failure]
    found = figures_of(turns)
    lines += [f"{label}: {f.first_error}." for f in found if f.failed][:1]
    if wrong := sum(f.wrong_lengths for f in found):
        lines.append(f"{label}: {wrong} answers have another length than was asked for.")
    if found and (shared := statistics.median(f.others_share for f in found)) > _SHARED:
        lines.append(f"{label}: other processes used {shared:.0%} of the machine meanwhile: not to be believed.")
    if any(f.late_ms > _LATE_MS for f in found):
        lines.append(f"{label}: the client sent late (p99 {max(f.late_ms for f in found):.0f} ms).")
    return lines


def markdown(results: RoutingResults) -> str:
    parts = [table(results)]
    if figures_of(results.turns.get(OURS, [])) and len(results.turns) > 1:
        parts.append(ratio_table(results))
    return "\n\n".join([*parts, *fidelity_lines(results), *notes(results)]) + "\n"
