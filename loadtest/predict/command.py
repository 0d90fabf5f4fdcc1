"""`loadtest predict`: reads an access log, fits the engine model, replays the requests at their own times, compares."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from loadtest.console import command_line, fail, markdown_table, plain_table, say
from loadtest.engine.step_time import PRESETS, Preset, StepTime
from loadtest.predict.comparison import (
    ClientRun,
    Line,
    Mismatch,
    Side,
    client_seconds,
    compared,
    first_of,
    measured_by_client,
    read_run,
    verdict,
)
from loadtest.predict.fit import FEWEST_IDLE, Calibration, NoFit, fit, overhead_of, served
from loadtest.recording import Logged, read_log, trace_of
from loadtest.replay.engine import ReplayEngine, ReplayRequest
from loadtest.replay.policies import OWN, RouterContext, router_of
from loadtest.replay.scenario import Scenario
from loadtest.replay.simulation import Simulation
from loadtest.replay.workload import requests_of
from loadtest.workloads.trace import Row, Trace, TraceError

_ONE_COPY = 1


def trace_from(requests: Sequence[Logged], block_tokens: int) -> Trace:
    """The trace that `loadtest record` makes of them, row by row."""
    rows = [
        Row(line["timestamp"] / 1000, line["input_length"], line["output_length"], keys=tuple(line["hash_ids"]))
        for line in trace_of(requests, block_tokens)
    ]
    return Trace("recorded", rows, block_tokens)


def replayed(trace: Trace, scenario: Scenario, step_time: StepTime, policy: str) -> list[ReplayRequest]:
    """The model's answer to each row, in the trace's order. Raises TraceError."""
    limits = scenario.limits(trace.block_tokens)
    longest = max(row.prompt_tokens + row.output_tokens for row in trace.rows)
    if longest > limits.num_blocks * trace.block_tokens:
        raise TraceError(f"--kv-tokens: the longest request has {longest} tokens")
    requests = requests_of(trace, _ONE_COPY, trace.rate_per_second, seed=0)
    engines = [ReplayEngine(limits, step_time) for _ in range(scenario.engines)]
    router = router_of(policy, RouterContext(scenario, trace.block_tokens, engines, rng=random.Random(policy)))
    Simulation(requests, engines, router).run()
    return requests


@dataclass(frozen=True, slots=True)
class Prediction:
    """The result. `client_seconds` is None if the gateway's own log has the measurements."""

    lines: Sequence[Line]
    judged: int
    _: KW_ONLY
    before: int  # earlier requests: they calibrate, and fill the caches
    calibration: Calibration
    client_seconds: float | None
    doubts: Sequence[str] = ()  # of the measurement


def predict(
    requests: Sequence[Logged],
    trace: Trace,
    scenario: Scenario,
    policy: str,
    step_time: StepTime | None = None,
    run: ClientRun | None = None,
) -> Prediction:
    """Judge the model by the client's run, or by the later half of the log. `trace` is its recording.

    All requests are replayed; judged ones have no part in the calibration. Raises NoFit, Mismatch, TraceError.
    """
    first = len(requests) // 2 if run is None else first_of(requests, run)
    end = len(requests) if run is None else first + len(run.sent)
    judged = requests[first:end]
    past = list(served(requests[:first]))
    budget = scenario.max_num_batched_tokens
    calibration = fit(past, budget) if step_time is None else overhead_of(past, step_time, budget)
    answers = replayed(trace, scenario, calibration.step_time, policy)[first:end]
    way = None if run is None else client_seconds(judged, run)
    streamed = [request.first_seconds is not None for request in judged]
    predicted = _predicted(answers, streamed, (calibration.overhead_seconds or 0.0) + (way or 0.0))
    measured = _measured(judged) if run is None else _with_usage(measured_by_client(run), judged)
    doubts = () if run is None else run.doubts
    return Prediction(
        compared(measured, predicted),
        len(judged),
        before=first,
        calibration=calibration,
        client_seconds=way,
        doubts=doubts,
    )


def _predicted(answers: Sequence[ReplayRequest], streamed: Sequence[bool], overhead_seconds: float) -> Side:
    return Side(
        ttft_seconds=[
            answer.ttft_seconds + overhead_seconds for answer, streams in zip(answers, streamed, strict=True) if streams
        ],
        e2e_seconds=[answer.e2e_seconds + overhead_seconds for answer in answers],
        output_tokens=sum(answer.output_tokens for answer in answers),
        seconds=max(answer.finished_seconds for answer in answers) - answers[0].arrival_seconds,
        hit_ratio=sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers),
    )


def _measured(judged: Sequence[Logged]) -> Side:
    return Side(
        ttft_seconds=[first for request in judged if (first := request.first_seconds) is not None],
        e2e_seconds=[request.duration_seconds for request in judged],
        output_tokens=sum(request.output_tokens for request in judged),
        seconds=max(request.at_seconds + request.duration_seconds for request in judged) - judged[0].at_seconds,
        hit_ratio=_reported_hit_ratio(judged),
    )


def _with_usage(side: Side, judged: Sequence[Logged]) -> Side:
    """The same; where the client did not read the engines' counters, with the hit rate that answers reported."""
    if side.hit_ratio is not None:
        return side
    return Side(
        side.ttft_seconds,
        side.e2e_seconds,
        side.output_tokens,
        seconds=side.seconds,
        hit_ratio=_reported_hit_ratio(judged),
    )


def _reported_hit_ratio(judged: Sequence[Logged]) -> float | None:
    known = [request for request in judged if request.cached_tokens is not None]
    prompts = sum(request.prompt_tokens for request in known)
    return sum(request.cached_tokens or 0 for request in known) / prompts if prompts else None


_HEAD = ("", "measured", "predicted", "difference")


def notes(prediction: Prediction, scenario: Scenario) -> list[str]:
    """The compared requests, and the components of times."""
    calibration, step = prediction.calibration, prediction.calibration.step_time
    engines = f"{scenario.engines} modelled engine{'' if scenario.engines == 1 else 's'}"
    source = f"fitted to {calibration.answers} earlier answers" if calibration.answers else "given"
    seconds, way = calibration.overhead_seconds, prediction.client_seconds
    if seconds is None:
        around = f"left out: of the earlier requests only {calibration.idle_requests} met an idle engine"
        around += f" ({FEWEST_IDLE} are needed)"
    else:
        around = f"{seconds * 1e3:.2f} ms, from {calibration.idle_requests} earlier requests that met an idle engine"
    between = "the gateway's log is what was measured" if way is None else f"{way * 1e3:.2f} ms from client to gateway"
    return [
        f"{prediction.judged:,} requests on {engines}, after {prediction.before:,} that calibrate and fill caches.",
        f"Step time, {source}: {step.base_seconds * 1e3:.2f} ms, {step.per_prefill_token_seconds * 1e6:.1f} µs a"
        f" prefilled token, {step.per_decode_sequence_seconds * 1e6:.1f} µs a decoding sequence.",
        f"Added to predicted TTFT and E2E: gateway and HTTP: {around}; {between}.",
        *(f"The client does not trust what it measured: {doubt}." for doubt in prediction.doubts),
    ]


def markdown(prediction: Prediction, scenario: Scenario) -> str:
    """The table, what it is made of, and the verdict."""
    _, text = verdict(prediction.lines)
    return "\n".join(
        (markdown_table(_HEAD, _rows(prediction), texts=1), "", *notes(prediction, scenario), "", text, "")
    )


def document(prediction: Prediction, scenario: Scenario, command: str) -> dict[str, Any]:
    fits, text = verdict(prediction.lines)
    return {
        "command": command,
        "fits": fits,
        "verdict": text,
        "judged": prediction.judged,
        "before": prediction.before,
        "figures": [
            {
                "name": line.name,
                "unit": "share" if line.points else "ms" if line.name.startswith(("TTFT", "E2E")) else "tokens/s",
                "measured": line.measured,
                "predicted": line.predicted,
                "difference": line.difference,
                "difference_unit": "points" if line.points else "share",
            }
            for line in prediction.lines
        ],
        "doubts": list(prediction.doubts),
        "calibration": asdict(prediction.calibration),
        "client_seconds": prediction.client_seconds,
        "engines": {
            "count": scenario.engines,
            "kv_tokens": scenario.kv_tokens,
            "max_num_seqs": scenario.max_num_seqs,
            "max_num_batched_tokens": scenario.max_num_batched_tokens,
        },
    }


def _rows(prediction: Prediction) -> list[tuple[str, str, str, str]]:
    return [
        (line.name, line.shown(line.measured), line.shown(line.predicted), line.difference_text)
        for line in prediction.lines
    ]


_FEWEST = 10


def predict_command(
    log: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Access log of a gateway.")],
    measured: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="results.json of a `loadtest run` that is in the log. Default: the log's later half is judged.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only requests for this model.")] = None,
    engines: Annotated[int | None, typer.Option(min=1, help="How many. Default: as many as the log names.")] = None,
    preset: Annotated[
        Preset | None, typer.Option(help="How fast an engine is. Default: fitted to the requests before the judged.")
    ] = None,
    policy: Annotated[str, typer.Option(help=f"The gateway's: {', '.join(OWN)}.")] = "ours",
    kv_tokens: Annotated[int, typer.Option(min=1, help="Size of a KV cache in tokens.")] = 430_000,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 8192,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", file_okay=False, help="Folder for prediction.json, prediction.md, trace.jsonl."),
    ] = None,
) -> None:
    """Replay a gateway's access log at its own pace, and compare with what was measured.

    The gateway needs `server.access_log_prefixes: true`. Exit code 0, however near the model is; 2: usage, a bad log.
    """
    complaints = Console(stderr=True)
    try:
        if policy not in OWN:
            raise ValueError(f"--policy: {policy!r} unknown; there are {', '.join(OWN)}")
        requests = _requests(log, model, complaints)
        scenario = Scenario(
            engines or max(1, len({request.backend for request in requests})),
            rate_per_second=0.0,
            seed=0,
            kv_tokens=kv_tokens,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        run = None if measured is None else read_run(measured)
        trace = trace_from(requests, block_size)
        given = None if preset is None else PRESETS[preset.value]
        found = predict(requests, trace, scenario=scenario, policy=policy, step_time=given, run=run)
    except (ValueError, OSError, Mismatch, NoFit, TraceError) as error:
        raise fail(error) from None
    _show(found, scenario)
    if out is not None:
        _keep(found, scenario, trace, out)
        say(complaints, f"wrote {out}: prediction.json, prediction.md, trace.jsonl")


def _requests(path: Path, model: str | None, complaints: Console) -> list[Logged]:
    with path.open("rb") as lines:
        log = read_log(lines, model)
    if len(log.requests) < _FEWEST:
        text = ", ".join(f"{count:,} {reason}" for reason, count in log.left_out.most_common())
        raise ValueError(f"{path}: {len(log.requests)} requests are too few; left out: {text or 'none'}")
    models = {request.model for request in log.requests}
    if len(models) > 1:
        raise ValueError(f"--model: the log has {', '.join(sorted(models))}")
    others = {reason: count for reason, count in log.left_out.most_common() if reason != "not of the access log"}
    if others:
        text = ", ".join(f"{count:,} {reason}" for reason, count in others.items())
        complaints.print(f"lines left out, though engines may have worked on some: {text}", soft_wrap=True)
    return log.requests


def _show(found: Prediction, scenario: Scenario) -> None:
    console = Console()
    console.print(plain_table(None, _HEAD, _rows(found)))
    for note in notes(found, scenario):
        say(console, note)
    fits, text = verdict(found.lines)
    say(console, text, "green" if fits else "yellow")


def _keep(found: Prediction, scenario: Scenario, trace: Trace, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    text = orjson.dumps(
        document(found, scenario, command_line()), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    )
    (out / "prediction.json").write_bytes(text)
    (out / "prediction.md").write_text(markdown(found, scenario), encoding="utf-8")
    with (out / "trace.jsonl").open("wb") as file:
        for row in trace.rows:
            line = {
                "timestamp": round(row.at_seconds * 1000),
                "input_length": row.prompt_tokens,
                "output_length": row.output_tokens,
                "hash_ids": row.keys,
            }
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
