"""`loadtest predict`: reads an access log, replays it, and reports the error of the model."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadtest.engine.scheduler import PRESETS, Preset
from loadtest.predict.comparison import Mismatch, read_run, verdict
from loadtest.predict.fit import FEWEST_IDLE, NoFit
from loadtest.predict.prediction import Prediction, predict, trace_from
from loadtest.recording import Logged, read_log
from loadtest.replay.policies import OWN
from loadtest.replay.scenario import Scenario
from loadtest.workloads.trace import Trace, TraceError

_HEAD = ("", "measured", "predicted", "difference")


def table(prediction: Prediction) -> Table:
    shown = Table(box=SIMPLE_HEAD)
    for number, name in enumerate(_HEAD):
        shown.add_column(name, justify="right" if number else "left")
    for row in _rows(prediction):
        shown.add_row(*row)
    return shown


def notes(prediction: Prediction, scenario: Scenario) -> list[str]:
    """What was compared, and what times are made of."""
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
    head = f"| {' | '.join(_HEAD)} |\n|---|---:|---:|---:|\n"
    rows = "".join(f"| {' | '.join(row)} |\n" for row in _rows(prediction))
    _, text = verdict(prediction.lines)
    return head + rows + "\n" + "\n".join((*notes(prediction, scenario), "", text)) + "\n"


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
    """  # fmt: skip
    complaints = Console(stderr=True)
    try:
        if policy not in OWN:
            raise ValueError(f"--policy: {policy!r} unknown; there are {', '.join(OWN)}")
        requests = _requests(log, model, complaints)
        scenario = Scenario(
            engines or max(1, len({request.backend for request in requests})), rate_per_second=0.0, seed=0,
            kv_tokens=kv_tokens, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        )  # fmt: skip
        run = None if measured is None else read_run(measured)
        trace = trace_from(requests, block_size)
        given = None if preset is None else PRESETS[preset.value]
        found = predict(requests, trace, scenario, policy, given, run)
    except (ValueError, OSError, Mismatch, NoFit, TraceError) as error:
        complaints.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    _tell(found, scenario)
    if out is not None:
        _keep(found, scenario, trace, out)
        complaints.print(f"wrote {out}: prediction.json, prediction.md, trace.jsonl", highlight=False, soft_wrap=True)


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


def _tell(found: Prediction, scenario: Scenario) -> None:
    console = Console()
    console.print(table(found))
    for note in notes(found, scenario):
        console.print(note, highlight=False, soft_wrap=True)
    fits, text = verdict(found.lines)
    console.print(text, style="green" if fits else "yellow", highlight=False, soft_wrap=True)


def _keep(found: Prediction, scenario: Scenario, trace: Trace, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["loadtest", *sys.argv[1:]])
    text = orjson.dumps(document(found, scenario, command), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
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
