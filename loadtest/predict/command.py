"""`loadtest predict`: reads an access log, replays it, and says how near the model was."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from loadtest.engine.command import Preset
from loadtest.engine.step_time import PRESETS
from loadtest.predict.client import Mismatch, read_run
from loadtest.predict.compare import verdict
from loadtest.predict.fit import NoFit
from loadtest.predict.model import trace_from
from loadtest.predict.prediction import Prediction, predict
from loadtest.predict.report import document, markdown, notes, table
from loadtest.recording.access_log import Logged, read_log
from loadtest.replay.policies import OWN
from loadtest.replay.scenario import Scenario
from loadtest.replay.trace import Trace, TraceError

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
        told = ", ".join(f"{count:,} {reason}" for reason, count in log.left_out.most_common())
        raise ValueError(f"{path}: {len(log.requests)} requests are too few; left out: {told or 'none'}")
    models = {request.model for request in log.requests}
    if len(models) > 1:
        raise ValueError(f"--model: the log has {', '.join(sorted(models))}")
    others = {reason: count for reason, count in log.left_out.most_common() if reason != "not of the access log"}
    if others:
        told = ", ".join(f"{count:,} {reason}" for reason, count in others.items())
        complaints.print(f"lines left out, though engines may have worked on some: {told}", soft_wrap=True)
    return log.requests


def _tell(found: Prediction, scenario: Scenario) -> None:
    console = Console()
    console.print(table(found))
    for note in notes(found, scenario):
        console.print(note, highlight=False, soft_wrap=True)
    fits, told = verdict(found.lines)
    console.print(told, style="green" if fits else "yellow", highlight=False, soft_wrap=True)


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
