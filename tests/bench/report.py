"""The comparison: medians by proxy, ours against the cheapest router, and whether the goals are met."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loadtest.compare.peers import OURS
from loadtest.compare.proxy import Peer
from loadtest.console import markdown_table
from tests.bench.deciding import results as timings
from tests.bench.embeddings.run import table as embeddings_table
from tests.bench.peers import PEERS
from tests.bench.results import Results, Sample, Turn
from tests.bench.scenarios import ALL, FULL, LINE, SCRAPED, SLOTS, WAITING

_PACE_REACHED = 0.95
_SATURATED = 0.95
_NOISY = 0.1


@dataclass(frozen=True)
class Column:
    """One figure; lower is better."""

    title: str
    scenario: str
    """Empty for what is measured once in a turn."""
    value: Callable[[Sample], float | None]
    digits: int
    goal_ratio: float | None = None
    """Ours over the lowest router."""
    goal_below: float | None = None


def _no_sample(sample: Sample) -> float | None:
    return None


COLUMNS = [
    Column("µs CPU per 1 KB request", "a1", lambda s: s.cpu_us_per_request, 1, goal_ratio=0.5),
    Column("µs CPU per 16 KB request", "a16", lambda s: s.cpu_us_per_request, 1, goal_ratio=0.5),
    Column("µs CPU per event, not paced", "sb", lambda s: s.cpu_us_per_event, 1),
    Column("µs CPU per event, one every 20 ms", "p20", lambda s: s.cpu_us_per_event, 1, goal_ratio=0.85),
    Column("µs CPU per event, one every 50 ms", "p50", lambda s: s.cpu_us_per_event, 1, goal_ratio=0.85),
    Column("p50 alone, µs", "c1", lambda s: s.load.latency_us.p50, 0, goal_ratio=0.65),
    Column("added TTFT p50, µs", "p20", lambda s: s.load.ttft_added_us.p50, 0, goal_ratio=1.0),
    Column("relay p99, ms", "p20", lambda s: s.load.relay_us.p99 / 1000, 2, goal_ratio=1.0),
]
MEMORY = Column("memory, MiB", "", _no_sample, 0, goal_below=100)
LINE_GOAL_RATIO = 1.1
STALL_GOAL_MS = 10.0
MARKS = {
    "!": "the paced rate was not reached",
    "^": "the core of engines and load generator was full",
    "~": "something else ran on the proxy's core",
    "#": "requests failed; not compared",
}


@dataclass(frozen=True)
class Cell:
    """One proxy's figure: the median over the repetitions, and what to keep in mind."""

    median: float
    low: float
    high: float
    marks: str = ""

    @property
    def comparable(self) -> bool:
        """Whether all requests it stands for succeeded."""
        return "#" not in self.marks


def columns_of(results: Results) -> list[Column]:
    """The columns whose scenarios were run."""
    return [column for column in COLUMNS if column.scenario in results.scenarios] + [MEMORY]


def marks_of(samples: Iterable[Sample]) -> str:
    """What makes samples of one scenario less than good; errors count from the first, the rest in the median."""
    taken = list(samples)
    marks = ""
    pace = [s.load.events_per_s / s.paced_events_per_s for s in taken if s.paced_events_per_s]
    if pace and statistics.median(pace) < _PACE_REACHED:
        marks += "!"
    if statistics.median(s.load_core_share for s in taken) >= _SATURATED:
        marks += "^"
    if statistics.median(s.others_share for s in taken) >= _NOISY:
        marks += "~"
    if any(s.load.error_count for s in taken):
        marks += "#"
    return marks


def cell(turns: list[Turn], column: Column) -> Cell | None:
    """One proxy's figure in one column, or None where there is none."""
    if column is MEMORY:
        values = [turn.memory_mib for turn in turns if turn.memory_mib is not None]
        marks = ""
    else:
        samples = [turn.samples[column.scenario] for turn in turns if column.scenario in turn.samples]
        values = [value for sample in samples if (value := column.value(sample)) is not None]
        marks = marks_of(samples) if samples else ""
    return Cell(statistics.median(values), min(values), max(values), marks) if values else None


@dataclass(frozen=True)
class Verdict:
    """Ours against the lowest router in one column."""

    column: Column
    ours: float
    against: str
    """The router that has the lowest figure; empty when none has one."""
    ratio: float | None

    @property
    def goal(self) -> str:
        if self.column.goal_ratio is not None:
            return f"≤ {self.column.goal_ratio:.2f}x"
        return f"< {self.column.goal_below:.0f} MiB" if self.column.goal_below is not None else ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal or without a router to compare with."""
        if self.column.goal_below is not None:
            return self.ours < self.column.goal_below
        if self.column.goal_ratio is None or self.ratio is None:
            return None
        return self.ratio <= self.column.goal_ratio


def verdict(results: Results, column: Column) -> Verdict | None:
    """None without a figure of ours that can be compared."""
    cells = {name: cell(turns, column) for name, turns in results.turns.items()}
    ours = cells.get(OURS)
    if ours is None or not ours.comparable:
        return None
    routers = {
        name: found.median
        for name, found in cells.items()
        if name in PEERS and PEERS[name].routes_by_prefix and found is not None and found.comparable
    }
    if not routers:
        return Verdict(column, ours.median, "", None)
    lowest = min(routers, key=lambda name: routers[name])
    return Verdict(column, ours.median, lowest, ours.median / routers[lowest] if routers[lowest] else None)


def _shown(found: Cell | None, column: Column) -> str:
    return "" if found is None else f"{found.median:,.{column.digits}f}{found.marks}"


def _judged(found: Verdict | None) -> tuple[str, str]:
    """The cells of the rows `ours against the lowest router` and `goal`."""
    if found is None:
        return "", ""
    ratio = f"{found.ratio:.2f}x {found.against}" if found.ratio is not None else ""
    outcome = {True: ": met", False: ": **not met**", None: ""}[found.met]
    return ratio, found.goal + outcome


def table(results: Results) -> str:
    """The figures as a Markdown table: medians by proxy, then ours against the lowest router, then the goals."""
    columns = columns_of(results)
    rows = []
    for name, turns in results.turns.items():
        policy = PEERS[name].policy if name in PEERS else ""
        label = f"{name} {results.versions.get(name, '')}".strip()
        label = f"**{label}**" if name == OURS else label
        rows.append([label, policy, *(_shown(cell(turns, column), column) for column in columns)])
    judged = [_judged(verdict(results, column)) for column in columns]
    rows.append(["gateway / lowest router", "", *(ratio for ratio, _ in judged)])
    rows.append(["goal", "", *(goal for _, goal in judged)])
    return markdown_table(["proxy", "policy", *(column.title for column in columns)], rows, texts=2)


def notes(results: Results) -> list[str]:
    """What a reader of the table must know: the machine, the marks, and what went wrong."""
    machine = results.machine
    repetitions = max((len(turns) for turns in results.turns.values()), default=0)
    lines = [
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, Linux {machine.kernel}; gateway on "
        f"{machine.python}; {machine.date}. One core for the proxy; medians of {repetitions} interleaved repetitions. "
        "Memory is the process tree's after all loads."
    ]
    if not machine.quotable:
        lines.append("**Not to be quoted**: the gateway ran on a Python without PGO and LTO, which costs 7 to 29 %.")
    shown = table(results)
    used = [f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in shown]
    if used:
        lines.append("Marks: " + "; ".join(used) + ".")
    for name, turns in results.turns.items():
        lines.extend(_complaints(name, turns))
    return lines


def line(turns: list[Turn]) -> str:
    """What a request costs with caps in force, and with requests that wait besides."""
    costs = {
        scenario.name: [
            cost
            for turn in turns
            if (sample := turn.samples.get(scenario.name)) and (cost := sample.cpu_us_per_request) is not None
        ]
        for scenario in (FULL, LINE)
    }
    if not all(costs.values()):
        return "\n".join(["Caps in force: no figures.", *_complaints(OURS, turns)])
    full, waiting = (statistics.median(found) for found in costs.values())
    ratio = waiting / full
    outcome = "met" if ratio <= LINE_GOAL_RATIO else "**not met**"
    row = [f"{FULL.events} events, {SLOTS} slots", f"{full:,.0f}", f"{waiting:,.0f}", f"{ratio:.2f}x"]
    heads = ["caps in force", "µs CPU per request", f"with {WAITING} waiting", "ratio", "goal"]
    return markdown_table(heads, [[*row, f"≤ {LINE_GOAL_RATIO:.2f}x: {outcome}"]], texts=1)


def stalls(turns: list[Turn]) -> str:
    """How long events wait in the gateway while it also probes, settles records and answers scrapes."""
    relays = [turn.samples[SCRAPED.name].load.relay_us for turn in turns if SCRAPED.name in turn.samples]
    if not relays:
        return ""
    figures = [statistics.median(found) / 1000 for found in zip(*((r.p99, r.p999, r.max) for r in relays), strict=True)]
    outcome = "met" if figures[-1] <= STALL_GOAL_MS else "**not met**"
    row = [SCRAPED.title, *(f"{figure:.2f}" for figure in figures), f"≤ {STALL_GOAL_MS:.0f} ms: {outcome}"]
    return markdown_table(["an event in the gateway", "p99, ms", "p99.9, ms", "longest, ms", "goal"], [row], texts=1)


def _complaints(name: str, turns: list[Turn]) -> list[str]:
    lines = [f"{name}: {turn.failure}." for turn in turns if turn.failure]
    for scenario in [*ALL, FULL, LINE, SCRAPED]:
        samples = [turn.samples[scenario.name] for turn in turns if scenario.name in turn.samples]
        errors = sum(sample.load.error_count for sample in samples)
        if errors:
            first = next(sample.load.first_error for sample in samples if sample.load.error_count)
            lines.append(f"{name}, {scenario.name}: {errors} errors, the first {first!r}.")
        if samples and scenario.connections > 1 and statistics.median(s.least_backend_share for s in samples) < 0.1:
            lines.append(f"{name}, {scenario.name}: one backend got nearly all requests.")
    return lines


def affinity(results: Results) -> str:
    """How well each proxy kept a group's requests together, which is what prefix routing is for."""
    sizes = [column.scenario for column in COLUMNS if column.scenario in ("a1", "a16")]
    shares: list[str] = []
    for name, turns in results.turns.items():
        found = [[turn.samples[size].affinity for turn in turns if size in turn.samples] for size in sizes]
        if any(found):
            shares.append(f"{name} " + " / ".join(f"{statistics.median(size):.2f}" for size in found if size))
    opening = "Requests (1 KB / 16 KB) at the backend with most of their group; 0.5 to 0.6 is chance: "
    return opening + ", ".join(shares) + "." if shares else ""


def markdown(results: Results) -> str:
    decisions = timings.table(results.timings) if results.timings else ""
    embeddings = embeddings_table(results.embeddings) if results.embeddings else ""
    waiting = line(results.line) if results.line else ""
    stalled = stalls(results.turns.get(OURS, []))
    parts = [table(results), *notes(results), affinity(results), waiting, stalled, decisions, embeddings]
    return "\n\n".join(part for part in parts if part) + "\n"


def problems(results: Results, required: Iterable[Peer]) -> list[str]:
    """Why a run is no good: errors, failures, or a proxy without figures."""
    found: list[str] = []
    for peer in required:
        turns = results.turns.get(peer.name, [])
        if not turns:
            found.append(f"{peer.name} did not run")
        for turn in turns:
            if turn.failure:
                found.append(f"{peer.name}: {turn.failure}")
            for name, sample in turn.samples.items():
                if sample.load.error_count:
                    found.append(f"{peer.name}, {name}: {sample.load.error_count} errors, {sample.load.first_error}")
                elif sample.load.all_requests == 0:
                    found.append(f"{peer.name}, {name}: no request was answered")
    return found
