"""The options of `loadtest replay`, listed once: types, defaults, help, and the scenarios that they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict
from typer import Argument

from loadtest.console import option
from loadtest.engine.step_time import PRESETS, Preset, parsed
from loadtest.replay.gateway_router import WAYS, admission_of, with_admission
from loadtest.replay.policies import NAMES, OWN, USUAL
from loadtest.replay.scenario import EngineFaults, LatencyBounds, Lengths, Misleading, Scenario
from loadtest.workloads.regimes import REGIMES

_T = TypeVar("_T")
_ROWS, _GRID, _ENGINE, _FAULTS, _OUTCOME = "Trace", "Grid", "Engines", "Faults", "Bounds and results"


class ReplayOptions(BaseModel):
    """The user's options, as typed."""

    model_config = ConfigDict(frozen=True)

    traces: Annotated[
        list[str],
        Argument(
            help="Each Mooncake's JSONL, a derivative of it, or sessions; or Azure's CSV;"
            f" or regime:NAME, made traffic of {', '.join(REGIMES)}."
        ),
    ]
    block_size: Annotated[
        int | None, option(_ROWS, "Tokens of a hash_ids block. Default: as the format has it.", min=1)
    ] = None
    limit: Annotated[int | None, option(_ROWS, "The first rows only.", min=1)] = None
    minutes: Annotated[float | None, option(_ROWS, "The first minutes only.", min=0.01)] = None
    output_times: Annotated[float, option(_ROWS, "Answers are so many times as long as recorded.", min=0.01)] = 1.0
    max_tokens_times: Annotated[
        float | None, option(_ROWS, "Clients state max_tokens, so many times the answer.", min=1)
    ] = None
    misjudged: Annotated[float, option(_ROWS, "Deviation of the logarithm of the gateway's prompt lengths.", min=0)] = (
        0.0
    )

    policies: Annotated[str, option(_GRID, f"`all` ({', '.join(USUAL)}), or some of {', '.join(NAMES)}.")] = (
        "ours,lmetric,sglang,llmd"
    )
    admission: Annotated[str | None, option(_GRID, f"The gateway's policies once under each of {', '.join(WAYS)}.")] = (
        None
    )
    itl_objective: Annotated[float | None, option(_GRID, "Seconds; adaptive limits keep to it.", min=0.001)] = None
    backends: Annotated[str, option(_GRID, "Numbers of engines.")] = "4,8"
    load: Annotated[str, option(_GRID, "Shares of capacity.")] = "0.8,0.95"
    capacity: Annotated[
        float | None, option(_GRID, "Requests/s that one engine carries. Default: found, and kept.", min=0.001)
    ] = None
    seeds: Annotated[int, option(_GRID, "How many; they shift and jitter the trace, and decide lots.", min=1)] = 1
    baseline: Annotated[str, option(_GRID, "The policy that ratios are against.")] = "lmetric"
    jobs: Annotated[int, option(_GRID, "Processes.", "--jobs", "-j", min=1)] = 2

    preset: Annotated[Preset, option(_ENGINE, "How fast an engine is.")] = Preset.H100_8B
    step_times: Annotated[
        Path | None,
        option(
            _ENGINE,
            "Instead of the preset's: the prediction.json of `loadtest predict`.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    kv_tokens: Annotated[int, option(_ENGINE, "Size of a KV cache in tokens.", min=1)] = 430_000
    max_num_seqs: Annotated[int, option(_ENGINE, "Sequences that run at once.", min=1)] = 256
    max_num_batched_tokens: Annotated[int, option(_ENGINE, "Tokens of a step.", min=1)] = 8192

    slow: Annotated[
        str | None,
        option(
            _FAULTS, "FACTOR:COUNT engines are slower; the gateway's configuration has it, but for FACTOR:COUNT:untold."
        ),
    ] = None
    restart: Annotated[str | None, option(_FAULTS, "AT:SHARE of the engines lose their caches, without an event.")] = (
        None
    )
    flash_crowd: Annotated[
        bool, option(_FAULTS, "12 % more requests, all on one new prefix of 8k tokens.", "--flash-crowd")
    ] = False
    join: Annotated[str | None, option(_FAULTS, "AT:COUNT engines join, with empty caches.")] = None
    misleading: Annotated[
        str | None,
        option(_FAULTS, "Metrics show waiting:N too many, preemptions[:N a second], kv:FACTOR, seqs:N (commas)."),
    ] = None

    slo_ttft: Annotated[float, option(_OUTCOME, "Bound on TTFT: these seconds, and what comes next.", min=0)] = 0.5
    slo_ttft_prefills: Annotated[float, option(_OUTCOME, "Times the prompt's prefill without a cache.", min=0)] = 1.5
    slo_tpot: Annotated[float, option(_OUTCOME, "Bound on TPOT in seconds.", min=0)] = 0.04
    out: Annotated[
        Path | None,
        option(
            _OUTCOME,
            "Folder for results.json, report.html; of several traces, one each.",
            "--out",
            "-o",
            file_okay=False,
        ),
    ] = None

    def fleets(self) -> list[Scenario]:
        """One scenario for each number of engines, without a load yet. Raises ValueError, OSError."""
        fitted = None if self.step_times is None else parsed(self.step_times.read_bytes())
        plain = Scenario(
            engines=1,
            rate_per_second=0.0,
            seed=0,
            step_time=PRESETS[self.preset.value] if fitted is None else fitted,
            kv_tokens=self.kv_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            itl_objective_seconds=self.itl_objective,
            bounds=LatencyBounds(self.slo_ttft, self.slo_ttft_prefills, self.slo_tpot),
            faults=self.faults(),
            lengths=Lengths(self.output_times, self.max_tokens_times, self.misjudged),
        )
        return [replace(plain, engines=engines) for engines in listed(self.backends, int, "--backends")]

    def faults(self) -> EngineFaults:
        faults = EngineFaults(flash_crowd=self.flash_crowd)
        if self.slow is not None:
            factor, engines, is_told = slow(self.slow)
            faults = replace(faults, slow_factor=factor, slow_engines=engines, slow_is_told=is_told)
        if self.restart is not None:
            at, share = restart(self.restart)
            faults = replace(faults, restart_at=at, restart_share=share)
        if self.join is not None:
            at, engines = join(self.join)
            faults = replace(faults, join_at=at, join_engines=engines)
        if self.misleading is not None:
            faults = replace(faults, misleading=misleading(self.misleading))
        return faults

    def loads(self) -> list[float]:
        """Shares of the capacity, of `--load`. Raises ValueError."""
        return listed(self.load, float, "--load")

    def arms(self) -> list[str]:
        """Policies, the gateway's once for each arm of admission. Raises ValueError."""
        return policies(self.policies, self.admission, self.baseline)


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


def slow(text: str) -> tuple[float, int, bool]:
    """So many engines take that multiple of the time; whether the gateway is told. Raises ValueError."""
    factor, colon, rest = text.partition(":")
    count, untold, word = rest.partition(":")
    try:
        parsed = float(factor), int(count) if colon else 1
    except ValueError:
        raise ValueError(f"--slow: {text!r} is not FACTOR:COUNT, such as 2.5:4, or FACTOR:COUNT:untold") from None
    if untold and word != "untold":
        raise ValueError(f"--slow: {text!r} is not FACTOR:COUNT:untold")
    if parsed[0] <= 0 or parsed[1] < 1:
        raise ValueError("--slow: factor and count must be above 0")
    return *parsed, not untold


def restart(text: str) -> tuple[float, float]:
    """AT:SHARE, where SHARE may be `half` or `all`: the moment and the engines that lose caches. Raises ValueError."""
    at, colon, share = text.partition(":")
    words = {"half": 0.5, "all": 1.0}
    try:
        moment, engines = float(at), words[share] if share in words else float(share) if colon else 0.5
    except ValueError:
        raise ValueError(f"--restart: {text!r} is not AT:SHARE, such as 0.4:half") from None
    if not (0 <= moment < 1 and 0 < engines <= 1):
        raise ValueError("--restart: the moment is a share from 0 to 1 of the replay, and so is SHARE of the engines")
    return moment, engines


def join(text: str) -> tuple[float, int]:
    """AT:COUNT: the moment, and how many engines come then. Raises ValueError."""
    at, colon, count = text.partition(":")
    try:
        moment, engines = float(at), int(count) if colon else 1
    except ValueError:
        raise ValueError(f"--join: {text!r} is not AT:COUNT, such as 0.4:1") from None
    if not (0 <= moment < 1 and engines >= 1):
        raise ValueError("--join: the moment is a share from 0 to 1 of the replay, COUNT at least 1")
    return moment, engines


def misleading(text: str) -> Misleading:
    """Faults between commas, such as `waiting:40,kv:0.25`. Raises ValueError."""
    shown = Misleading()
    for fault in text.split(","):
        kind, _, number = fault.strip().partition(":")
        try:
            if kind == "waiting":
                shown = replace(shown, waiting=int(number))
            elif kind == "preemptions":
                shown = replace(shown, preemptions=float(number or 1))
            elif kind == "kv":
                shown = replace(shown, kv_times=float(number))
            elif kind == "seqs":
                shown = replace(shown, max_num_seqs=int(number))
            else:
                raise ValueError
        except ValueError:
            raise ValueError(f"--misleading: {fault!r} is not waiting:N, preemptions:N, kv:FACTOR or seqs:N") from None
    if shown.waiting < 0 or shown.preemptions < 0 or shown.kv_times <= 0 or (shown.max_num_seqs or 1) < 1:
        raise ValueError("--misleading: numbers must be above 0")
    return shown
