"""The options of `loadtest compare`: its own, and those of `loadtest run` that say what is sent."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, model_validator
from typer import Argument, Option

from loadtest.compare.outage.run import OutageLoad, usual
from loadtest.compare.peers import PEERS_DIR
from loadtest.drive.target import base_url
from loadtest.servers.engines import EngineOptions, Kind

_ARMS, _ENGINES, _AWAY = "Proxies", "Engines", "An engine away"
_SHORTEST_SECONDS = 12.0
_SIMULATED_MODEL, _REAL_MODEL = "simulated", ".models/tiny"
_OVERHEAD_PAIRS = 60

# What is sent, when, and what it must keep to: as `loadtest run` has it.
OF_RUN = (
    "concurrency", "rate", "ramp", "arrivals", "burstiness", "trace", "trace_speed", "trace_block", "duration",
    "requests", "max_in_flight", "workers", "repeat", "timeout", "warmup", "endpoint", "workload", "dataset",
    "turns", "think", "groups", "prefix_tokens", "tail_tokens", "bytes_per_token", "max_tokens", "output_spread",
    "ignore_eos", "extra_body", "seed", "slo", "max_error_ratio", "out",
)  # fmt: skip


class Killing(StrEnum):
    """Whether an engine is taken away under each proxy."""

    NO = "no"
    ALSO = "also"
    ONLY = "only"


class Overheads(StrEnum):
    """Where overhead is measured apart from the workload."""

    AUTO = "auto"
    YES = "yes"
    NO = "no"


def _option(*names: str, panel: str, text: str, **more: Any) -> Any:
    return Option(*names, rich_help_panel=panel, help=text, **more)


class CompareOptions(BaseModel):
    """What the user asked for, besides the load."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    arms: Annotated[
        list[str] | None,
        Argument(help="direct, gateway, and the names that --list shows. Default: all that are installed."),
    ] = None
    list_: Annotated[
        bool, _option("--list", panel=_ARMS, text="List which proxies are installed, and how to have the others.")
    ] = False
    install: Annotated[
        list[str] | None,
        _option(panel=_ARMS, text="Install a proxy by pip into an environment of its own: NAME, or NAME=WHAT as pip"
                " takes it; may be given again."),
    ] = None  # fmt: skip
    peers: Annotated[
        Path, _option(file_okay=False, panel=_ARMS, text="Folder of the proxies' environments, one of each name.")
    ] = PEERS_DIR
    gateway_config: Annotated[
        Path | None,
        _option(exists=True, dir_okay=False, panel=_ARMS, text="A gateway's file, but for its addresses and backends."),
    ] = None
    engine: Annotated[
        Kind, _option(panel=_ENGINES, text="Engines that are started for this: simulated, or real vLLM on the CPU.")
    ] = Kind.SIM
    engines: Annotated[int, _option(min=1, panel=_ENGINES, text="How many.")] = 2
    model: Annotated[
        str | None, _option(panel=_ENGINES, text=f"vllm: its folder (default {_REAL_MODEL}). Else its name.")
    ] = None
    kv_tokens: Annotated[int, _option(min=1024, panel=_ENGINES, text="KV cache of each engine.")] = 65_536
    max_num_seqs: Annotated[int, _option(min=1, panel=_ENGINES, text="Sequences that each engine runs at once.")] = 32
    max_model_len: Annotated[
        int | None,
        _option(min=64, panel=_ENGINES, text="vllm: longest sequence, below --kv-tokens. Default: what the model can."),
    ] = None
    backends: Annotated[
        str | None,
        _option(panel=_ENGINES, text="URLs between commas of vLLM servers that run already and that nothing else uses,"
                " instead of starting any."),
    ] = None  # fmt: skip
    overhead: Annotated[
        Overheads,
        _option(panel=_ENGINES, text="Cost of requests and of streams, apart from the workload; auto: with simulated"
                " engines, which leave time for it."),
    ] = Overheads.AUTO  # fmt: skip
    pairs: Annotated[
        int, _option(min=0, panel=_ENGINES, text="Single requests with and without the proxy, for the added latency.")
    ] = _OVERHEAD_PAIRS

    killed: Annotated[
        Killing,
        _option(panel=_AWAY, text="Take one of the engines away under each proxy, after the workload or instead of it:"
                " killed and started again, and hanging."),
    ] = Killing.NO  # fmt: skip
    killed_seconds: Annotated[
        float | None,
        _option(min=_SHORTEST_SECONDS, panel=_AWAY, text="How long each such load is, of which the engine is away for"
                f" a third (default: {usual(Kind.SIM).seconds:g}, vllm: {usual(Kind.VLLM).seconds:g})."),
    ] = None  # fmt: skip

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.killed is not Killing.NO and (self.backends is not None or self.engines < 2):
            raise ValueError("--killed wants engines of its own, two at least")
        if self.backends is not None and not self.backend_urls:
            raise ValueError("--backends wants URLs between commas")
        return self

    @property
    def backend_urls(self) -> tuple[str, ...]:
        return tuple(base_url(url.strip()) for url in (self.backends or "").split(",") if url.strip())

    @property
    def engine_options(self) -> EngineOptions:
        by_default = _REAL_MODEL if self.engine is Kind.VLLM else _SIMULATED_MODEL
        return EngineOptions(
            self.engine,
            self.engines,
            Path(self.model or by_default),
            self.kv_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len_tokens=self.max_model_len,
        )

    @property
    def killed_load(self) -> OutageLoad:
        return usual(self.engine, self.killed_seconds)

    @property
    def measures_overhead(self) -> bool:
        """Whether requests and streams are measured by themselves."""
        simulated = self.engine is Kind.SIM and self.backends is None
        return self.overhead is Overheads.YES or (self.overhead is Overheads.AUTO and simulated)
