"""What a sweep reports on runs that are kept, without starting anything."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from loadtest.drive.fleet import Stopped
from loadtest.report.schema import GpuSeries, Results, Samples
from loadtest.sweep.plan import parse
from loadtest.sweep.report import outcome, show, write_report
from loadtest.sweep.run import Sweep
from loadtest.sweep.space import Configuration, space_of
from loadtest.sweep.store import Failure, Store, SweepRun
from tests.unit.loadtest.report.pages import assert_it_needs_nothing, plots_of
from tests.unit.loadtest.sweep.runs import results

Made = Callable[[Configuration], Results | None]


def sweep(folder: Path, should_stop: Callable[[], bool] = lambda: False, **changes: Any) -> Sweep:
    document = {
        "serve": {"command": ["vllm", "serve", "m"], "env": {"TOKEN": "secret"}},
        "flags": {"max-num-seqs": [1, 2, 4, 8], "max-num-batched-tokens": [4]},
        "workloads": [{"name": "short", "run": {"concurrency": 4, "requests": 100}}],
        "objective": {"ttft_p95_seconds": 0.5},
    }
    plan = parse(document | changes)
    return Sweep(
        plan,
        space=space_of(plan),
        store=Store(folder, plan),
        console=Console(file=io.StringIO()),
        should_stop=should_stop,
    )


def seqs(configuration: Configuration) -> int:
    value = dict(configuration.flags)["max-num-seqs"]
    assert isinstance(value, int)
    return value


def keep(made: Sweep, run_of: Made, share: float = 1.0) -> None:
    """As if every configuration had been run; those without results have failed."""
    for configuration in made.space.configurations:
        for workload in made.plan.workloads:
            for way in made.plan.through:
                for repetition in range(made.plan.repeat):
                    cell = SweepRun(configuration, way, workload, share=share, repetition=repetition)
                    if (run := run_of(configuration)) is None:
                        made.store.keep_failure(cell, Failure(why="exit code 2", log=["no such flag"]))
                    else:
                        made.store.keep(cell, run, [])


def by_seqs(configuration: Configuration) -> Results | None:
    """The more sequences, the faster, and the later the first token; 2 does not start."""
    many = seqs(configuration)
    return None if many == 2 else results(ttft=many / 5, tpot=0.05 / many)


def test_what_is_kept_is_not_run_again_and_the_best_within_the_bounds_wins(tmp_path: Path) -> None:
    made = sweep(tmp_path)
    keep(made, by_seqs)
    made.carry_out()
    found = outcome(made, finished=True)
    assert [(one.workload, one.flags["max-num-seqs"]) for one in found.winners] == [("short", 1)]
    assert found.winners[0].command.startswith("vllm serve m --max-num-seqs 1 --max-num-batched-tokens 4")
    assert list(found.left_out.values()) == ["max-num-batched-tokens 4 is below max-num-seqs 8"]
    assert [entry.label.split()[0] for entry in found.entries] == ["max-num-seqs=1", "max-num-seqs=4", "max-num-seqs=2"]
    assert found.entries[1].complaints[0].startswith("TTFT p95 0.8 s > 0.5 s")
    assert found.entries[2].log == ["no such flag"]


def test_the_page_has_the_winner_numbered_points_and_a_column_for_each_flag(tmp_path: Path) -> None:
    made = sweep(tmp_path)
    keep(made, by_seqs)
    made.carry_out()
    found = outcome(made, finished=True)
    write_report(made, found)
    html = (tmp_path / "report.html").read_text()
    runs = sorted((tmp_path / "runs").rglob("report.html"))
    assert_it_needs_nothing(html, sorted(run.relative_to(tmp_path).as_posix() for run in runs))
    assert html.index(found.winners[0].command) < html.index("What was tested") < html.index("<th>max-num-seqs</th>")
    assert "<th>max-num-batched-tokens</th>" not in html  # it is the same in all
    assert "TTFT p95 0.8 s &gt; 0.5 s" in html
    assert "no such flag" in html
    assert "max-num-batched-tokens 4 is below max-num-seqs 8" in html
    ttft, tpot, _ = plots_of(html)
    assert (ttft["x"]["title"], ttft["y"]["title"]) == ("TTFT p95", "output tokens/s")
    assert [text for _, _, text in ttft["labels"]] == ["1", "2"]
    assert ttft["ringed"] == [ttft["labels"][0][:2]]
    assert ttft["uprights"] == [[500, "limit: 500 ms"]]
    assert tpot["uprights"] == []


def test_gpus_that_were_watched_are_columns(tmp_path: Path) -> None:
    busy = [90.0] * 20
    gpu = GpuSeries(name="0", driver="1", memory_total_mib=1.0, at=[float(at) for at in range(20)],
                    utilization_percent=busy, power_watts=busy)  # fmt: skip
    made = sweep(tmp_path)

    def watched(configuration: Configuration) -> Results | None:
        found = by_seqs(configuration)
        return found and found.model_copy(update={"samples": Samples(gpus=[gpu], no_gpu=None, pages=[])})

    keep(made, watched)
    made.carry_out()
    found = outcome(made, finished=True)
    assert found.entries[0].figures["gpu_percent"] == found.entries[0].figures["gpu_watts"] == 90
    tokens = found.entries[0].figures["output_tokens_per_second"]
    assert found.entries[0].figures["tokens_per_joule"] == pytest.approx(tokens / 90)
    write_report(made, found)
    assert "| GPU % | GPU W | tokens/J |" in (tmp_path / "report.md").read_text()


def test_halving_gives_longer_runs_to_the_best_alone(tmp_path: Path) -> None:
    made = sweep(tmp_path, search="halving", halving={"factor": 3, "shortest": 0.3}, objective={})
    keep(made, by_seqs, 1 / 3)
    keep(made, lambda configuration: by_seqs(configuration) if seqs(configuration) == 4 else None)
    made.carry_out()
    assert [(stage.share, len(stage.configurations)) for stage in made.stages] == [(pytest.approx(1 / 3), 3), (1.0, 1)]
    found = outcome(made, finished=True)
    assert found.winners[0].flags["max-num-seqs"] == 4
    assert [entry.share for entry in found.entries] == [1.0, pytest.approx(1 / 3), pytest.approx(1 / 3)]


def test_a_sweep_that_was_stopped_starts_nothing_and_has_no_winner(tmp_path: Path) -> None:
    made = sweep(tmp_path, lambda: True)
    with pytest.raises(Stopped):
        made.carry_out()
    found = outcome(made, finished=False)
    assert (found.winners, found.entries) == ([], [])


def test_what_was_found_before_a_stop_is_reported_without_a_winner(tmp_path: Path) -> None:
    made = sweep(tmp_path)
    keep(made, by_seqs)
    made.carry_out()
    found = outcome(made, finished=False)
    assert (found.winners, len(found.entries)) == ([], 3)
    write_report(made, found)
    assert "It was stopped before its end." in (tmp_path / "report.md").read_text()


def test_a_plan_that_changes_elsewhere_keeps_its_results(tmp_path: Path) -> None:
    keep(sweep(tmp_path), by_seqs)
    wider = sweep(tmp_path, flags={"max-num-seqs": [1], "max-num-batched-tokens": [4]}, objective={}, repeat=2)
    (configuration,) = wider.space.configurations
    done = [
        wider.store.is_done(SweepRun(configuration, "direct", wider.plan.workloads[0], share=1.0, repetition=n))
        for n in (0, 1)
    ]
    assert done == [True, False]
    reordered = sweep(tmp_path, flags={"max-num-batched-tokens": [4], "seed": [None], "max-num-seqs": [1]})
    assert reordered.store.is_done(
        SweepRun(reordered.space.configurations[0], "direct", reordered.plan.workloads[0], share=1.0, repetition=0)
    )
    other_load = [{"name": "short", "run": {"concurrency": 5, "requests": 100}}]
    for changes in ({"workloads": other_load}, {"serve": {"command": ["vllm", "serve", "n"]}}):
        other = sweep(tmp_path, **changes)
        cell = SweepRun(other.space.configurations[0], "direct", other.plan.workloads[0], share=1.0, repetition=0)
        assert not other.store.is_done(cell)


def test_failures_are_forgotten_where_that_is_asked_for(tmp_path: Path) -> None:
    made = sweep(tmp_path)
    keep(made, by_seqs)
    cells = [
        SweepRun(one, "direct", made.plan.workloads[0], share=1.0, repetition=0) for one in made.space.configurations
    ]
    assert all(map(made.store.is_done, cells))
    made.store.forget_failures()
    assert [made.store.is_done(cell) for cell in cells] == [True, False, True]


def test_the_folder_holds_figures_a_page_a_picture_and_no_secret(tmp_path: Path) -> None:
    made = sweep(tmp_path, repeat=2)
    keep(made, by_seqs)
    made.carry_out()
    found = outcome(made, finished=True)
    assert found.winners[0].tied == []  # nothing else keeps within the bounds
    written = write_report(made, found)
    assert {path.name for path in written} == {"sweep.json", "report.html", "report.md", "pareto-short.svg", "vllm"}
    assert "secret" not in (tmp_path / "sweep.json").read_text()
    page = (tmp_path / "report.md").read_text()
    assert "Winner: `max-num-seqs=1 max-num-batched-tokens=4`" in page
    assert "![Pareto picture](pareto-short.svg)" in page
    assert "no such flag" in page
    picture = ElementTree.fromstring((tmp_path / "pareto-short.svg").read_text())
    reported = " ".join(text for text in picture.itertext())
    assert "output tokens/s against TTFT p95" in reported
    assert "max-num-seqs=4" in reported
    shown = io.StringIO()
    show(found, made.plan, Console(file=shown, width=200))
    assert re.search(r"short: max-num-seqs=1 .* output tokens/s\n  vllm serve m", shown.getvalue())


@pytest.mark.parametrize(
    ("repeat", "why"),
    [
        (1, "1 run of each cannot separate configurations, repeat: 4 or more can"),
        (3, "3 runs of each cannot separate configurations, repeat: 4 or more can"),
        (4, "it ties with max-num-seqs="),
    ],
)
def test_a_tie_is_called_a_tie_on_the_page_and_on_the_terminal(tmp_path: Path, repeat: int, why: str) -> None:
    made = sweep(tmp_path, repeat=repeat)
    for repetition in range(repeat):
        for configuration in made.space.configurations:
            cell = SweepRun(configuration, "direct", made.plan.workloads[0], share=1.0, repetition=repetition)
            # In every second repetition the others are ahead.
            ttft = 0.1 + 0.01 * (seqs(configuration) if repetition % 2 else 9 - seqs(configuration))
            made.store.keep(cell, results(ttft=ttft), [])
    made.carry_out()
    found = outcome(made, finished=True)
    assert len(found.winners[0].tied) == 2
    write_report(made, found)
    shown = io.StringIO()
    show(found, made.plan, Console(file=shown, width=200))
    for text in ((tmp_path / "report.md").read_text(), shown.getvalue()):
        assert f"no clear winner: {why}" in text
    html = (tmp_path / "report.html").read_text()
    assert html.count('<span class="near">tie</span>') == 3
    assert all(entry.interval for entry in found.entries)
    assert "Winner:" not in (tmp_path / "report.md").read_text()


def test_a_configuration_that_the_client_could_not_keep_up_with_leaves_no_clear_winner(tmp_path: Path) -> None:
    made = sweep(tmp_path, objective={})
    keep(made, lambda configuration: results(tpot=0.05 / seqs(configuration), valid=seqs(configuration) != 4))
    made.carry_out()
    found = outcome(made, finished=True)
    assert found.winners[0].flags["max-num-seqs"] == 2
    write_report(made, found)
    drawn, *_ = plots_of((tmp_path / "report.html").read_text())
    assert sorted(text for _, _, text in drawn["labels"]) == ["1", "2"]  # not the one without a valid run
    shown = io.StringIO()
    show(found, made.plan, Console(file=shown, width=80))
    for text in ((tmp_path / "report.html").read_text(), " ".join(shown.getvalue().split())):
        assert "the client could not keep up with max-num-seqs=4" in text
    head = next(line for line in shown.getvalue().splitlines() if "TTFT p95" in line)
    assert "max-num-" in head  # a column for each flag that differs, and complaints below
    assert "\n3: the client was slow" in shown.getvalue()


def test_vllms_own_plots_find_what_they_need(tmp_path: Path) -> None:
    made = sweep(tmp_path, repeat=2)
    keep(made, by_seqs)
    made.carry_out()
    write_report(made, outcome(made, finished=True))
    summaries = sorted((tmp_path / "vllm").rglob("summary.json"))
    assert len(summaries) == 2
    records = json.loads(summaries[0].read_text())
    assert [one["run_number"] for one in records] == [0, 1]
    needed = {"output_throughput", "total_token_throughput", "median_ttft_ms", "p99_tpot_ms", "max_concurrency"}
    assert needed <= set(records[0])
    assert (records[0]["max_num_seqs"], records[0]["workload"], records[0]["through"]) == (1, "short", "direct")
    overall = results(ttft=0.2, tpot=0.05).overall  # of by_seqs: 100 answers of 11 tokens to prompts of 100
    seconds = overall.end - overall.start
    assert records[0]["output_throughput"] == pytest.approx(100 * 11 / seconds)
    assert records[0]["total_token_throughput"] == pytest.approx(100 * 111 / seconds)
    assert records[0]["median_ttft_ms"] == pytest.approx(200)
