"""The plan of a sweep, as its file says it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.config.errors import error_lines
from loadtest.drive.options import DEFAULT_DURATION_SECONDS, RunOptions

Scalar = bool | int | float | str | None
FlagValue = Scalar | dict[str, Any]
Seconds = Annotated[float, Field(gt=0)]

_FLAG = re.compile(r"[a-z][a-z0-9-]*(\.[A-Za-z0-9_.-]+)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A measurement is one run of one server: what would make it several, or another's, is the sweep's own business.
_NOT_IN_A_RUN = (
    *("url", "targets", "out", "repeat", "until", "find", "metrics_url", "backends", "admin_url"),
    *("api_key", "header", "insecure", "cacert"),
)
_ANY_URL = "http://127.0.0.1"


class PlanError(Exception):
    """The plan cannot be used; the message says where and why, a line for each thing."""


class Section(BaseModel):
    """A part of the file: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class VllmCpu(Section):
    """The real vLLM on this machine's CPU."""

    model: Path = Field(description="Folder of the model.")
    venv: Path = Field(Path(".venv-vllm"), description="Where vLLM is installed.")
    kv_cache_gib: int = Field(1, ge=1)


def _spelt(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags with dashes, none in front. Raises ValueError."""
    spelt = {str(flag).replace("_", "-") if "." not in str(flag) else str(flag): value for flag, value in flags.items()}
    if len(spelt) < len(flags):
        raise ValueError("a flag is there twice, with dashes and with underscores")
    for flag in spelt:
        if not _FLAG.fullmatch(flag):
            raise ValueError(f"{flag!r} is no flag; write it in full and without dashes in front, as max-num-seqs")
        if flag in ("host", "port"):
            raise ValueError(f"{flag} is chosen by the sweep")
    return spelt


class Serve(Section):
    """What is started for each configuration: one of the first three."""

    command: list[str] | None = Field(None, min_length=1, description="{port} in it is replaced, or --port appended.")
    simulated: dict[str, FlagValue] | None = Field(None, description="`loadtest sim` with these flags; true = none.")
    vllm_cpu: VllmCpu | None = None
    env: dict[str, str] = Field(default_factory=dict, description="Beside the variables that the sweep has.")
    ready_seconds: Seconds = Field(600.0, description="A server that is not ready by then has failed.")

    @field_validator("simulated", mode="before")
    @classmethod
    def _may_be_true(cls, value: Any) -> Any:
        return {} if value is True else None if value is False else value

    @field_validator("simulated")
    @classmethod
    def _is_spelt(cls, flags: dict[str, FlagValue] | None) -> dict[str, FlagValue] | None:
        return None if flags is None else _spelt(flags)

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_are_text(cls, value: Any) -> Any:
        return {key: _text(item) for key, item in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if [self.command, self.simulated, self.vllm_cpu].count(None) != 2:
            raise ValueError("give one of command, simulated and vllm_cpu")
        return self


class Workload(Section):
    """One kind of traffic; each is swept apart and has a winner of its own."""

    name: str
    run: dict[str, Any] = Field(description="Options of `loadtest run`, without dashes in front.")

    @field_validator("name")
    @classmethod
    def _is_a_file_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("may hold letters, digits and . _ - only")
        return name

    @field_validator("run")
    @classmethod
    def _is_a_run(cls, run: dict[str, Any]) -> dict[str, Any]:
        run = {str(name).replace("-", "_"): value for name, value in run.items()}
        for name in run:
            if name in _NOT_IN_A_RUN:
                raise ValueError(f"{name.replace('_', '-')} is not for a sweep's runs")
            if name not in RunOptions.model_fields:
                raise ValueError(f"{name.replace('_', '-')} is no option of loadtest run")
        run = {name: _as_typed(name, value) for name, value in run.items()}
        try:
            runs = RunOptions(**run, url=_ANY_URL).runs
        except ValidationError as error:
            raise ValueError("; ".join(line.removeprefix("configuration: ") for line in error_lines(error))) from None
        if not any(run.get(name) for name in ("concurrency", "rate", "trace")):
            raise ValueError("give --concurrency (closed loop), --rate (open loop), or --trace")
        if runs > 1:
            raise ValueError("several loads: make each a workload of its own")
        return run

    def options(self, url: str, share: float, repetition: int) -> RunOptions:
        """The options of one run. All configurations get the same prompts; repetitions get different ones."""
        options = RunOptions(**self.run, url=url)
        changed: dict[str, Any] = {"seed": (options.seed or 0) + 1000 * repetition}
        if share < 1:
            if options.requests is not None:
                changed["requests"] = max(1, round(options.requests * share))
            if options.requests is None or options.duration is not None:
                # Without either, a run has the seconds that `loadtest run` has by default.
                changed["duration"] = (options.duration or DEFAULT_DURATION_SECONDS) * share
        return options.model_copy(update=changed)


def _as_typed(option: str, value: Any) -> Any:
    """What YAML made of a value that the command line takes as text."""
    annotation = str(RunOptions.model_fields[option].annotation)
    if option == "extra_body" and isinstance(value, dict):
        return orjson.dumps(value).decode()
    if option == "mix" and isinstance(value, dict):
        return ",".join(f"{name}={share}" for name, share in value.items())
    if "str" in annotation and not isinstance(value, str | list | dict):
        return _text(value)
    return value


def _text(value: Any) -> Any:
    if value is False:
        return "off"  # YAML reads an unquoted `off` as false
    return str(value) if isinstance(value, int | float) and value is not True else value


class Figure(StrEnum):
    """What can be maximised."""

    OUTPUT_TOKENS = "output_tokens_per_second"
    OUTPUT_TOKENS_PER_GPU = "output_tokens_per_second_per_gpu"
    PROMPT_TOKENS = "prompt_tokens_per_second"
    REQUESTS = "requests_per_second"


class Objective(Section):
    """The most of a figure within all bounds; latencies count from the moment a request was due."""

    maximise: Figure = Figure.OUTPUT_TOKENS
    ttft_p95_seconds: Seconds | None = None
    tpot_p95_seconds: Seconds | None = None
    e2e_p95_seconds: Seconds | None = None
    gpu_percent: float | None = Field(None, gt=0, le=100, description="The least mean utilisation of the GPUs.")

    @property
    def bounds(self) -> dict[str, float]:
        """The latencies that a configuration must not exceed, by the name of the figure; those that there are."""
        return {
            name: value
            for name in ("ttft_p95_seconds", "tpot_p95_seconds", "e2e_p95_seconds")
            if (value := getattr(self, name)) is not None
        }


class Halving(Section):
    """Short runs of all configurations, longer ones of the best, whole ones of the best of those."""

    factor: float = Field(3.0, gt=1, description="One in so many goes on, to runs that are so many times as long.")
    shortest: float = Field(0.1, gt=0, le=1, description="The shortest runs are at least this share of a whole one.")


Way = Literal["direct", "gateway"]


class SweepPlan(Section):
    """A whole sweep."""

    serve: Serve
    flags: dict[str, list[FlagValue]] = Field(description="Values of each flag; null leaves it out.")
    exclude: list[dict[str, FlagValue]] = Field(
        default_factory=list, description="Combinations of values that are not tried, whatever the other flags are."
    )
    workloads: list[Workload] = Field(min_length=1)
    objective: Objective = Objective()
    through: list[Way] = Field(["direct"], min_length=1, description="The first is what configurations are judged by.")
    gateway_config: Path | None = Field(None, description="The gateway's configuration; its backends are replaced.")
    search: Literal["grid", "halving"] = "grid"
    halving: Halving = Halving()
    gpus: int | None = Field(None, ge=1, description="How many there are; configurations that need more are left out.")
    repeat: int = Field(1, ge=1, description="Runs of each configuration under each workload; medians count.")

    @field_validator("through", mode="before")
    @classmethod
    def _may_be_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("flags")
    @classmethod
    def _has_values(cls, flags: dict[str, list[FlagValue]]) -> dict[str, list[FlagValue]]:
        for flag, values in (spelt := _spelt(flags)).items():
            written = [orjson.dumps(value, option=orjson.OPT_SORT_KEYS) for value in values]
            if not values or len(set(written)) < len(written):
                raise ValueError(f"{flag} needs values, each once")
        return spelt

    @field_validator("exclude")
    @classmethod
    def _is_spelt(cls, excluded: list[dict[str, FlagValue]]) -> list[dict[str, FlagValue]]:
        return [_spelt(part) for part in excluded]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        names = [workload.name for workload in self.workloads]
        if len(set(names)) < len(names):
            raise ValueError("workloads: each name once")
        if len(set(self.through)) < len(self.through):
            raise ValueError("through: each way once")
        if self.gateway_config is not None and "gateway" not in self.through:
            raise ValueError("gateway_config is for `through: gateway`")
        if unknown := {flag for part in self.exclude for flag in part} - set(self.flags):
            raise ValueError(f"exclude: {', '.join(sorted(unknown))} is not among the flags")
        if self.search == "halving" and any(workload.run.get("trace") for workload in self.workloads):
            raise ValueError("halving shortens runs, and a trace has a length of its own: use search: grid")
        return self


def parse(document: Any) -> SweepPlan:
    """Checks a parsed document. Raises PlanError with one line for each thing that is wrong."""
    if not isinstance(document, dict):
        raise PlanError("the plan must be a mapping with the keys serve, flags and workloads")
    try:
        return SweepPlan.model_validate(document)
    except ValidationError as error:
        raise PlanError("\n".join(error_lines(error)).replace("configuration: ", "plan: ")) from None
