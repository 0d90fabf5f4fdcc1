"""Writes a sweep's results: tables, sweep.json, the page, Markdown, SVG of the frontier, vLLM's bench layout."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from loadtest.console import markdown_table, plain_table, say
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, ChartSeries, linear, nice_top
from loadtest.report.formatting import margin, milliseconds, number
from loadtest.report.schema import Distribution, Environment, Results
from loadtest.report.sheet import sheet, style
from loadtest.sweep.judge import GPU_FIGURES, LATENCIES, Judged, aim_of, best, figure_label, frontier, tied, winner
from loadtest.sweep.page import WAYS, flag_text, sweep_page, varied
from loadtest.sweep.plan import FlagValue, Objective, SweepPlan, Way
from loadtest.sweep.run import Stage, Sweep
from loadtest.sweep.schema import ConfigurationResult, SweepOutcome, Winner, unsure
from loadtest.sweep.server import command_text
from loadtest.sweep.space import Configuration


def outcome(sweep: Sweep, *, finished: bool) -> SweepOutcome:
    """The contents of the sweep's folder for its plan."""
    plan, space = sweep.plan, sweep.space
    winners, entries = [], []
    for workload in plan.workloads:
        stages = [stage for stage in sweep.stages if stage.workload is workload]
        for way in plan.through:
            entries += _entries(sweep, stages, way)
        whole = stages[-1] if stages and stages[-1].share == 1 else None
        found = sweep.found(whole, plan.through[0]) if whole else {}
        # Of a part of the configurations the best is no winner yet.
        if finished and (first := winner(found)) is not None:
            ties = [configuration.label for configuration in tied(found, first)]
            unjudged = [configuration.label for configuration, its in found.items() if not its.valid]
            winners.append(_winner(plan, workload.name, first=first, found=found[first], ties=ties, unjudged=unjudged))
    return SweepOutcome(
        finished=finished,
        plan=plan.model_dump(mode="json", exclude={"serve": {"env"}}),
        gpus={configuration.label: sweep.gpus(configuration) for configuration in space.configurations},
        winners=winners,
        entries=entries,
        left_out={configuration.label: why for configuration, why in space.left_out},
    )


def _winner(
    plan: SweepPlan, workload: str, first: Configuration, found: Judged, ties: list[str], unjudged: list[str]
) -> Winner:
    return Winner(
        workload=workload,
        label=first.label,
        flags=dict(first.flags),
        value=found.value,
        command=shlex.join(command_text(plan, first)),
        runs=len(found.values),
        tied=ties,
        unjudged=unjudged,
    )


def _entries(sweep: Sweep, stages: list[Stage], way: Way) -> list[ConfigurationResult]:
    """Of each configuration the last stage that it ended or failed in; those that came further stand first."""
    entries: dict[Configuration, ConfigurationResult] = {}
    for stage in reversed(stages):
        found, failures = sweep.found(stage, way), sweep.failures(stage, way)
        for configuration in best(found, len(found)):
            if configuration not in entries and configuration not in failures:
                this = found[configuration]
                entries[configuration] = _entry(
                    sweep,
                    stage,
                    way,
                    configuration,
                    figures=dict(this.figures),
                    value=this.value,
                    interval=this.interval,
                    fits=this.fits,
                    valid=this.valid,
                    complaints=this.complaints,
                )
        for configuration, failure in failures.items():
            if configuration not in entries:
                entries[configuration] = _entry(
                    sweep,
                    stage,
                    way,
                    configuration,
                    figures={},
                    value=None,
                    fits=False,
                    complaints=[failure.why],
                    log=failure.log,
                )
    return list(entries.values())


def _entry(sweep: Sweep, stage: Stage, way: Way, configuration: Configuration, **fields: Any) -> ConfigurationResult:
    return ConfigurationResult(
        label=configuration.label,
        flags=dict(configuration.flags),
        workload=stage.workload.name,
        through=way,
        share=stage.share,
        runs=sweep.plan.repeat,
        folder=sweep.store.folder_of(configuration).relative_to(sweep.store.folder).as_posix(),
        **fields,
    )


_LINE, _GREY, _BOUND = style(6), style(6), style(5)
_COLOURS = 5  # the sixth and seventh are the bound's and that of the line


def pareto(entries: Sequence[ConfigurationResult], objective: Objective) -> str | None:
    """A chart for each latency that was measured; None where no configuration has both figures."""
    measured = {name: found for name in LATENCIES[:2] if (found := [one for one in entries if name in one.figures])}
    on_a_frontier = dict.fromkeys(label for name, found in measured.items() for label in _frontier(found, name))
    best = {label: style(number % _COLOURS) for number, label in enumerate(on_a_frontier)}
    charts = [_chart(found, name, objective, best) for name, found in measured.items()]
    if not charts:
        return None
    legend = [(colour, label) for label, colour in best.items()]
    legend += [(_LINE, "frontier; grey dots are on none")]
    legend += [(_BOUND, "bound")] if objective.bounds else []
    return sheet(charts, legend)


def _frontier(entries: Sequence[ConfigurationResult], name: str) -> list[str]:
    costs, worths = _points(entries, name)
    return frontier(list(costs), costs.__getitem__, worths.__getitem__)


def _points(entries: Sequence[ConfigurationResult], name: str) -> tuple[dict[str, float], dict[str, float]]:
    return {one.label: one.figures[name] for one in entries}, {one.label: one.value or 0.0 for one in entries}


def _chart(entries: Sequence[ConfigurationResult], name: str, objective: Objective, best: Mapping[str, str]) -> Chart:
    """`best` has the colours of configurations that are on the frontier of this chart or another."""
    costs, worths = _points(entries, name)
    kept = _frontier(entries, name)
    bound = objective.bounds.get(name)
    right = nice_top(max([*costs.values(), *([bound] if bound is not None else [])]))
    top = nice_top(max(worths.values()))
    series = [ChartSeries("frontier", _LINE, [(costs[label], worths[label]) for label in kept], steps=True)]
    if bound is not None:
        series.append(ChartSeries("bound", _BOUND, [(bound, 0.0), (bound, top)]))
    series += [
        ChartSeries(label, best.get(label, _GREY), [(costs[label], worths[label])])
        for label in sorted(costs, key=lambda label: label in best)
    ]
    return Chart(
        title=f"{figure_label(objective.maximise.value)} against {figure_label(name)}",
        note="in seconds; up and left is better",
        x=linear(0, right, start_px=X_START, end_px=X_END, wanted=6),
        y=linear(0, top, start_px=Y_START, end_px=Y_END, wanted=4),
        series=series,
    )


def write_vllm_layout(sweep: Sweep, folder: Path) -> None:
    """Whole runs alone: a folder with a summary.json for each configuration, workload and way."""
    for stage in (stage for stage in sweep.stages if stage.share == 1):
        for way in sweep.plan.through:
            for configuration in stage.configurations:
                runs = sweep.runs(stage, way, configuration)
                if not runs:
                    continue
                bench = {"workload": stage.workload.name, "through": way}
                records = [record(run, number, dict(configuration.flags), bench) for number, run in enumerate(runs)]
                name = sweep.store.folder_of(configuration).name
                written = folder / f"SERVE-{name}-BENCH-{stage.workload.name}-{way}"
                written.mkdir(parents=True, exist_ok=True)
                (written / "summary.json").write_bytes(orjson.dumps(records, option=orjson.OPT_INDENT_2))


def record(results: Results, number: int, flags: Mapping[str, FlagValue], bench: Mapping[str, str]) -> dict[str, Any]:
    """One run under vLLM's names; latencies count from the actual send, as there."""
    overall, tokens, latency, plan = results.overall, results.tokens, results.latency, results.plan
    seconds = overall.end - overall.start
    made: dict[str, Any] = {
        "duration": seconds,
        "completed": results.requests.succeeded,
        "failed": results.requests.failed,
        "total_input_tokens": tokens.prompt,
        "total_output_tokens": tokens.completion,
        "request_throughput": overall.requests_per_second,
        "output_throughput": tokens.completion / seconds if seconds else 0.0,
        "total_token_throughput": (tokens.prompt + tokens.completion) / seconds if seconds else 0.0,
        "max_concurrent_requests": results.concurrency.peak,
        "request_rate": plan.get("rate_per_second") or "inf",
        "model_id": plan.get("model"),
        "num_prompts": results.requests.offered,
        "date": re.sub(r"[^0-9]", "", results.environment.started_at)[:14],
    }
    if plan.get("concurrency"):
        made["max_concurrency"] = plan["concurrency"]
    for name, values in (("ttft", latency.ttft), ("tpot", latency.tpot), ("itl", latency.itl), ("e2el", latency.e2e)):
        made |= _latency(name, values)
    chosen = {flag.replace("-", "_"): value for flag, value in flags.items() if value is not None}
    return made | {"run_number": number} | chosen | dict(bench)


def _latency(name: str, values: Distribution | None) -> dict[str, float]:
    if values is None:
        return {}
    return {
        f"mean_{name}_ms": values.mean,
        f"median_{name}_ms": values.p50,
        **{f"p{point}_{name}_ms": getattr(values, f"p{point}") for point in (90, 95, 99)},
    }


_LOG_LINES = 8


def write_report(sweep: Sweep, found: SweepOutcome) -> list[Path]:
    """Writes the joint results of all runs into the sweep's folder."""
    folder = sweep.store.folder
    figures, page = folder / "sweep.json", folder / "report.md"
    figures.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    pictures: dict[str, str] = {}
    for workload in sweep.plan.workloads:
        entries = found.of(workload.name, sweep.plan.through[0])
        drawn = pareto([entry for entry in entries if entry.share == 1 and entry.valid], sweep.plan.objective)
        if drawn is not None:
            pictures[workload.name] = f"pareto-{workload.name}.svg"
            (folder / pictures[workload.name]).write_text(drawn, encoding="utf-8")
    page.write_text(markdown(found, sweep.plan, pictures), encoding="utf-8")
    html = folder / "report.html"
    links = {(entry.workload, entry.through, entry.label): _pages(folder, entry) for entry in found.entries}
    html.write_text(sweep_page(found, sweep.plan.objective, _environment(sweep), links), encoding="utf-8")
    write_vllm_layout(sweep, folder / "vllm")
    return [figures, html, page, *(folder / name for name in pictures.values()), folder / "vllm"]


def _pages(folder: Path, entry: ConfigurationResult) -> list[str]:
    """The reports of a configuration's runs, as links of the sweep's page."""
    runs = (folder / entry.folder).glob(f"{entry.workload}-{entry.through}-*/{entry.share:.4g}-r*/report.html")
    return sorted(run.relative_to(folder).as_posix() for run in runs)


def _environment(sweep: Sweep) -> Environment | None:
    """Of the first run that there is."""
    for stage in sweep.stages:
        for way in sweep.plan.through:
            for configuration in stage.configurations:
                for run in sweep.runs(stage, way, configuration):
                    return run.environment
    return None


def show(found: SweepOutcome, plan: SweepPlan, console: Console) -> None:
    """A table for each workload and way, then the winners."""
    for workload in plan.workloads:
        for way in plan.through:
            entries = found.of(workload.name, way)
            if not entries:
                continue
            watched, flags = _watched(entries), varied(entries)
            head = ["", *flags, *_head(plan, watched)[1:-1]]
            table = plain_table(_title(workload.name, way), head, overflow="fold")
            for place, entry in enumerate(entries, 1):
                style = None if entry.fits else "dim" if entry.value is not None else "red"
                cells = [str(place), *(flag_text(entry.flags.get(flag)) for flag in flags)]
                table.add_row(*map(Text, [*cells, *_row(entry, watched)[1:-1]]), style=style)
            console.print(table)
            for place, entry in enumerate(entries, 1):
                if entry.complaints:
                    say(console, f"{place}: {'; '.join(entry.complaints)}", "dim" if entry.value is not None else "red")
    for line in winner_lines(found, plan):
        say(console, line, "bold")


def winner_lines(found: SweepOutcome, plan: SweepPlan) -> list[str]:
    """One for each workload, and how its server is started."""
    lines = []
    for workload in plan.workloads:
        won = next((one for one in found.winners if one.workload == workload.name), None)
        if won is None:
            why = "no configuration keeps within the bounds" if found.finished else "not finished"
            lines.append(f"{workload.name}: {why}")
        else:
            text = f"{number(won.value)} {figure_label(plan.objective.maximise.value)}"
            lines.append(f"{workload.name}: {won.label}, {text}\n  {won.command}")
            if why := unsure(won):
                lines.append(f"  {why}")
    return lines


def markdown(found: SweepOutcome, plan: SweepPlan, pictures: dict[str, str]) -> str:
    parts = ["# Sweep", f"{aim_of(plan.objective)}."]
    if not found.finished:
        parts.append("It was stopped before its end.")
    for workload in plan.workloads:
        parts.append(f"## {workload.name}")
        won = next((one for one in found.winners if one.workload == workload.name), None)
        parts += _won(won) if won else ["No winner."]
        if workload.name in pictures:
            parts.append(f"![Pareto picture]({pictures[workload.name]})")
        for way in plan.through:
            if entries := found.of(workload.name, way):
                watched = _watched(entries)
                rows = [_row(entry, watched) for entry in entries]
                parts += [_title(workload.name, way), markdown_table(_head(plan, watched), rows)]
    if found.left_out:
        rows = [[label, why] for label, why in found.left_out.items()]
        parts += ["## Not tried", markdown_table(["configuration", "why"], rows)]
    failed = {entry.label: entry for entry in found.entries if entry.log}
    if failed:
        parts.append("## Failed")
        for label, entry in failed.items():
            log = "\n".join(entry.log[-_LOG_LINES:])
            parts.append(f"`{label}`: {'; '.join(entry.complaints)}\n\n```\n{log}\n```")
    return "\n\n".join(parts) + "\n"


def _won(won: Winner) -> list[str]:
    why = unsure(won)
    text = f"Best median: `{won.label}`; {why}." if why else f"Winner: `{won.label}`"
    return [text, f"```sh\n{won.command}\n```"]


def _title(workload: str, way: Way) -> str:
    return f"{workload}, {WAYS[way]}"


def _watched(entries: Sequence[ConfigurationResult]) -> list[str]:
    """The figures of GPUs that some configuration has."""
    return [name for name in GPU_FIGURES if any(name in entry.figures for entry in entries)]


def _head(plan: SweepPlan, watched: Sequence[str]) -> list[str]:
    shown = (plan.objective.maximise.value, *LATENCIES, *watched)
    return ["configuration", *map(figure_label, shown), "runs", ""]


def _row(entry: ConfigurationResult, watched: Sequence[str]) -> list[str]:
    cells = [entry.label, number(entry.value) + margin(entry.value or 0.0, entry.interval)]
    for name in LATENCIES:
        seconds = entry.figures.get(name)
        cells.append(milliseconds(None if seconds is None else seconds * 1e3))
    cells += [number(entry.figures.get(name)) for name in watched]
    runs = f"{entry.runs}" if entry.share == 1 else f"{entry.runs} of {entry.share:.0%}"
    return [*cells, runs, "; ".join(entry.complaints)]
