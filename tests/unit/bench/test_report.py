"""The report holds ours against the cheapest router, and does not hide what is wrong with a figure."""

import pytest

from tests.bench import report
from tests.bench.embeddings.run import ARMS
from tests.bench.embeddings.run import Sample as EmbeddingSample
from tests.bench.peers import PEERS
from tests.bench.report import COLUMNS, MEMORY, cell, marks_of, verdict
from tests.bench.results import Results, Turn
from tests.bench.scenarios import ALL
from tests.unit.bench.builders import cpu_turn, make_results, make_sample

CPU_1K = next(column for column in COLUMNS if column.scenario == "a1")


def test_a_cell_is_the_median_of_the_repetitions_with_their_range() -> None:
    found = cell([cpu_turn(30), cpu_turn(90), cpu_turn(40)], CPU_1K)
    assert found is not None
    assert (found.median, found.low, found.high, found.marks) == (40, 30, 90, "")


def test_a_repetition_that_failed_leaves_the_others_to_count() -> None:
    found = cell([cpu_turn(30), Turn(failure="it ended")], CPU_1K)
    assert found is not None
    assert found.median == 30
    assert cell([Turn(failure="it ended")], CPU_1K) is None


def test_ours_is_held_against_the_cheapest_router_and_never_against_a_plain_proxy() -> None:
    turns = {"gateway": [cpu_turn(20)], "nginx": [cpu_turn(10)], "smg": [cpu_turn(100)], "vllm-router": [cpu_turn(50)]}
    found = verdict(make_results(turns), CPU_1K)
    assert found is not None
    assert (found.against, found.ratio, found.goal, found.met) == ("vllm-router", 0.4, "≤ 0.50x", True)


def test_a_goal_that_is_missed_is_called_so() -> None:
    turns = {"gateway": [cpu_turn(44)], "smg": [cpu_turn(50)]}
    found = verdict(make_results(turns), CPU_1K)
    assert found is not None
    assert found.met is False
    assert "≤ 0.50x: **not met**" in report.table(make_results(turns))


def test_a_router_whose_requests_failed_is_not_compared_with() -> None:
    failing = Turn(samples={"a1": make_sample(proxy_cpu_seconds=0.1, errors={"lost": 1})})
    turns = {"gateway": [cpu_turn(40)], "smg": [failing], "vllm-router": [cpu_turn(50)]}
    results = make_results(turns)
    found = verdict(results, CPU_1K)
    assert found is not None
    assert found.against == "vllm-router"
    assert "smg, a1: 1 errors, the first 'lost: closed'." in report.markdown(results)


def test_ours_is_not_judged_by_requests_that_failed() -> None:
    failing = Turn(samples={"a1": make_sample(errors={"status": 1})})
    assert verdict(make_results({"gateway": [failing], "smg": [cpu_turn(50)]}), CPU_1K) is None


def test_without_a_router_there_is_no_ratio_but_memory_is_still_judged() -> None:
    results = make_results({"gateway": [cpu_turn(40, memory_mib=130)]})
    cpu, memory = verdict(results, CPU_1K), verdict(results, MEMORY)
    assert cpu is not None
    assert (cpu.ratio, cpu.met) == (None, None)
    assert memory is not None
    assert (memory.goal, memory.met) == ("< 100 MiB", False)


@pytest.mark.parametrize(
    ("marks", "changes"),
    [
        ("", {}),
        ("!", {"events_per_s": 23_000}),
        ("^", {"load_core_share": 0.97}),
        ("~", {"others_share": 0.2}),
        ("#", {"errors": {"truncated": 1}}),
        ("!^", {"events_per_s": 1_000, "load_core_share": 1.0}),
    ],
)
def test_a_figure_carries_marks_for_what_is_wrong_with_it(marks: str, changes: dict[str, object]) -> None:
    sample = make_sample(events=100_000, **changes)  # type: ignore[arg-type]
    assert marks_of([sample]) == marks


def test_one_bad_repetition_of_three_marks_nothing_but_errors_always_do() -> None:
    good, slow, failing = make_sample(), make_sample(events_per_s=1), make_sample(errors={"lost": 1})
    assert marks_of([good, good, slow]) == ""
    assert marks_of([good, good, failing]) == "#"


def test_the_table_has_a_row_for_each_proxy_and_one_for_ratio_and_goal() -> None:
    results = make_results({"gateway": [cpu_turn(20)], "smg": [cpu_turn(50)]})
    assert report.table(results).splitlines() == [
        "| proxy | policy | µs CPU per 1 KB request | memory, MiB |",
        "| --- | --- | --: | --: |",
        "| **gateway 1.0** | prefix | 20.0 | 50 |",
        "| smg 1.0 | cache-aware | 50.0 | 50 |",
        "| gateway / lowest router |  | 0.40x smg | 1.00x smg |",
        "| goal |  | ≤ 0.50x: met | < 100 MiB: met |",
    ]


def _line_turn(full_us: float, line_us: float) -> Turn:
    costs = {"full": full_us, "line": line_us}
    return Turn(samples={name: make_sample(proxy_cpu_seconds=cost / 100) for name, cost in costs.items()})


@pytest.mark.parametrize(("line_us", "goal"), [(105, "≤ 1.10x: met"), (150, "≤ 1.10x: **not met**")])
def test_a_line_may_cost_a_tenth_more(line_us: float, goal: str) -> None:
    shown = report.line([_line_turn(100, line_us)] * 3).splitlines()[-1]
    assert shown == f"| 20 events, 32 slots | 100 | {line_us:.0f} | {line_us / 100:.2f}x | {goal} |"


def test_a_line_that_was_not_measured_says_why() -> None:
    assert report.line([Turn(failure="it ended")]) == "Caps in force: no figures.\ngateway: it ended."


@pytest.mark.parametrize(("longest_us", "goal"), [(9_000, "≤ 10 ms: met"), (12_000, "≤ 10 ms: **not met**")])
def test_no_event_may_wait_long_for_a_scrape(longest_us: float, goal: str) -> None:
    turns = [Turn(samples={"scraped": make_sample(relay_p99_us=each)}) for each in (1_000, longest_us, 90_000)]
    assert report.stalls(turns).splitlines()[-1].endswith(f"| {longest_us / 1000:.2f} | {goal} |")
    assert report.stalls([Turn(failure="it ended")]) == ""


def test_figures_of_a_plain_python_are_not_to_be_quoted() -> None:
    results = make_results({"gateway": [cpu_turn(40)]})
    assert "Not to be quoted" not in report.markdown(results)
    plain = results.model_copy(update={"machine": results.machine.model_copy(update={"quotable": False})})
    assert "**Not to be quoted**" in report.markdown(plain)


def test_notes_name_the_machine_the_marks_in_use_and_a_backend_that_was_not_used() -> None:
    turns = {"smg": [cpu_turn(50, others_share=0.3, least_backend_share=0.0), Turn(failure="it ended")]}
    text = report.markdown(make_results(turns))
    assert "test CPU, 2 cores, 8 GiB, Linux 6.1; gateway on CPython 3.11; 2026-01-01" in text
    assert "medians of 2 interleaved repetitions" in text
    assert "Marks: ~ something else ran on the proxy's core." in text
    assert "smg, a1: one backend got nearly all requests." in text
    assert "smg: it ended." in text
    assert "chance: smg 1.00." in text


def test_problems_are_failures_errors_and_silence() -> None:
    gateway, nginx, smg = PEERS["gateway"], PEERS["nginx"], PEERS["smg"]
    failing = Turn(samples={"a1": make_sample(errors={"lost": 2}), "a16": make_sample(requests=0)}, failure="it ended")
    results = make_results({"gateway": [failing], "smg": [cpu_turn(1)]})
    assert report.problems(results, [smg]) == []
    assert report.problems(results, [gateway, nginx]) == [
        "gateway: it ended",
        "gateway, a1: 2 errors, lost: closed",
        "gateway, a16: no request was answered",
        "nginx did not run",
    ]


def test_every_column_has_its_scenario() -> None:
    assert {column.scenario for column in COLUMNS} <= {scenario.name for scenario in ALL}


def test_what_batches_of_embeddings_are_worth_follows_and_is_kept() -> None:
    samples = [EmbeddingSample(arm, 64, 100.0, 1.0, 2.0, 0.5, 0.1) for arm in ARMS]
    results = make_results({"gateway": [cpu_turn(40)]}).model_copy(update={"embeddings": samples})
    kept = Results.model_validate_json(results.model_dump_json())
    assert "| 64 | batching | 100 | 1.00 | 2.0 | 0.50 | 0.100 |" in report.markdown(kept)
