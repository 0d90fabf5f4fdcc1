"""The options of `loadtest replay`: their help, and how lists and faults are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from typer import Argument, Option

from loadtest.engine.scheduler import Preset
from loadtest.replay.gateway_router import WAYS, admission_of, with_admission
from loadtest.replay.policies import NAMES, OWN, USUAL

_T = TypeVar("_T")
_ROWS, _GRID, _ENGINE, _FAULTS, _OUTCOME = "Trace", "Grid", "Engines", "Faults", "Bounds and results"


def _option(*names: str, panel: str, text: str, **more: Any) -> Any:
    return Option(*names, rich_help_panel=panel, help=text, **more)


TracePath = Annotated[Path, Argument(help="Mooncake's JSONL, a derivative of it, or sessions; or Azure's CSV.")]
BlockSize = Annotated[
    int | None, _option(min=1, panel=_ROWS, text="Tokens of a hash_ids block. Default: as the format has it.")
]
Limit = Annotated[int | None, _option(min=1, panel=_ROWS, text="The first rows only.")]
Minutes = Annotated[float | None, _option(min=0.01, panel=_ROWS, text="The first minutes only.")]

Policies = Annotated[str, _option(panel=_GRID, text=f"`all` ({', '.join(USUAL)}), or some of {', '.join(NAMES)}.")]
Admissions = Annotated[
    str | None,
    _option("--admission", panel=_GRID, text=f"The gateway's policies once under each of {', '.join(WAYS)}."),
]
Backends = Annotated[str, _option(panel=_GRID, text="Numbers of engines.")]
Loads = Annotated[str, _option("--load", panel=_GRID, text="Shares of capacity.")]
Capacity = Annotated[
    float | None, _option(min=0.001, panel=_GRID, text="Requests/s that one engine carries. Default: found, and kept.")
]
Seeds = Annotated[int, _option(min=1, panel=_GRID, text="How many; they shift and jitter the trace, and decide lots.")]
Baseline = Annotated[str, _option(panel=_GRID, text="The policy that ratios are against.")]
Jobs = Annotated[int, _option("--jobs", "-j", min=1, panel=_GRID, text="Processes.")]

Speed = Annotated[Preset, _option("--preset", panel=_ENGINE, text="How fast an engine is.")]
KvTokens = Annotated[int, _option(min=1, panel=_ENGINE, text="Size of a KV cache in tokens.")]
MaxNumSeqs = Annotated[int, _option(min=1, panel=_ENGINE, text="Sequences that run at once.")]
MaxNumBatchedTokens = Annotated[int, _option(min=1, panel=_ENGINE, text="Tokens of a step.")]

OutputTimes = Annotated[
    float, _option("--output-times", min=0.01, panel=_ROWS, text="Answers are so many times as long as recorded.")
]
MaxTokensTimes = Annotated[
    float | None,
    _option("--max-tokens-times", min=1, panel=_ROWS, text="Clients state max_tokens, so many times the answer."),
]
Misjudged = Annotated[
    float,
    _option("--misjudged", min=0, panel=_ROWS, text="Deviation of the logarithm of the gateway's prompt lengths."),
]
ItlObjective = Annotated[
    float | None, _option("--itl-objective", min=0.001, panel=_GRID, text="Seconds; adaptive limits keep to it.")
]
SlowEngines = Annotated[
    str | None,
    _option("--slow", panel=_FAULTS, text="FACTOR:COUNT engines are slower; the gateway knows, from the start."),
]
LostCaches = Annotated[
    str | None, _option("--restart", panel=_FAULTS, text="AT:SHARE of the engines lose their caches, without an event.")
]
Crowd = Annotated[
    bool, _option("--flash-crowd", panel=_FAULTS, text="12 % more requests, all on one new prefix of 8k tokens.")
]

SloTtft = Annotated[float, _option(min=0, panel=_OUTCOME, text="Bound on TTFT: these seconds, and what comes next.")]
SloTtftPrefills = Annotated[float, _option(min=0, panel=_OUTCOME, text="Times the prompt's prefill without a cache.")]
SloTpot = Annotated[float, _option(min=0, panel=_OUTCOME, text="Bound on TPOT in seconds.")]
Out = Annotated[
    Path | None, _option("--out", "-o", file_okay=False, panel=_OUTCOME, text="Folder for results.json, report.html.")
]


def listed(text: str, parse: Callable[[str], _T], name: str) -> list[_T]:
    try:
        values = [parse(part.strip()) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not a list of values between commas") from None
    if any(isinstance(value, int | float) and value <= 0 for value in values):
        raise ValueError(f"{name}: values must be above 0")
    return values


def policies(text: str, admission: str | None = None, baseline: str | None = None) -> list[str]:
    """Names between commas, or `all`; the gateway's once for each arm of admission. Raises ValueError."""
    names = list(USUAL) if text == "all" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"--policies: {', '.join(unknown)} unknown; there are {', '.join(NAMES)}")
    names = list(dict.fromkeys(names))
    if admission is not None:
        arms = [admission_of(arm.strip()).name for arm in admission.split(",")]
        names = [
            arm for name in names for arm in ([with_admission(name, way) for way in arms] if name in OWN else [name])
        ]
    # One that is known and not replayed only leaves the ratios out.
    if baseline is not None and baseline not in (*NAMES, *names):
        raise ValueError(f"--baseline: {baseline} unknown; it is one of the policies: {', '.join(names)}")
    return names


@dataclass(frozen=True, slots=True)
class Slow:
    """So many engines take that multiple of the time."""

    factor: float
    engines: int


def slow(text: str) -> Slow:
    factor, colon, count = text.partition(":")
    try:
        parsed = Slow(float(factor), int(count) if colon else 1)
    except ValueError:
        raise ValueError(f"--slow: {text!r} is not FACTOR:COUNT, such as 2.5:4") from None
    if parsed.factor <= 0 or parsed.engines < 1:
        raise ValueError("--slow: factor and count must be above 0")
    return parsed


@dataclass(frozen=True, slots=True)
class Restart:
    """At this share of the replay, this share of the engines lose their caches."""

    at: float
    share: float


def restart(text: str) -> Restart:
    """AT:SHARE, where SHARE may be `half` or `all`. Raises ValueError."""
    at, colon, share = text.partition(":")
    words = {"half": 0.5, "all": 1.0}
    try:
        parsed = Restart(float(at), words[share] if share in words else float(share) if colon else 0.5)
    except ValueError:
        raise ValueError(f"--restart: {text!r} is not AT:SHARE, such as 0.4:half") from None
    if not (0 <= parsed.at < 1 and 0 < parsed.share <= 1):
        raise ValueError("--restart: the moment is a share from 0 to 1 of the replay, and so is SHARE of the engines")
    return parsed
