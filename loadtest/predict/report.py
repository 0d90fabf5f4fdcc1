"""A prediction for the terminal, as Markdown, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from loadtest.predict.compare import verdict
from loadtest.predict.fit import FEWEST_IDLE
from loadtest.predict.prediction import Prediction
from loadtest.replay.scenario import Scenario

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
    _, told = verdict(prediction.lines)
    return head + rows + "\n" + "\n".join((*notes(prediction, scenario), "", told)) + "\n"


def document(prediction: Prediction, scenario: Scenario, command: str) -> dict[str, Any]:
    fits, told = verdict(prediction.lines)
    return {
        "command": command,
        "fits": fits,
        "verdict": told,
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
        (line.name, line.shown(line.measured), line.shown(line.predicted), line.difference_told)
        for line in prediction.lines
    ]
