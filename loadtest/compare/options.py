"""The options of `loadtest compare`: its own, and the options of `loadtest run` for its requests."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, model_validator
from typer import Argument

from loadtest.compare.outage.run import OutageLoad, usual
from loadtest.compare.peers import PEERS_DIR
from loadtest.console import option
from loadtest.drive.options import RunOptions
from loadtest.drive.target import base_url
from loadtest.servers.engines import EngineOptions, Kind

_ARMS, _ENGINES, _AWAY = "Proxies", "Engines", "An engine away"
_SHORTEST_SECONDS = 12.0
_SIMULATED_MODEL, _REAL_MODEL = "simulated", ".models/tiny"
_OVERHEAD_PAIRS = 60

# Options of `loadtest run` that a comparison lacks; it has the ones for requests, their times and bounds.
_NOT_OF_RUN = (
    "url targets model embeddings_model stream api_key header insecure cacert metrics_url backends admin_url mix "
    "inputs cache_salt verify find until"
)
OF_RUN = tuple(name for name in RunOptions.model_fields if name not in _NOT_OF_RUN.split())


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


class CompareOptions(BaseModel):
    """The user's options, except for the load."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    arms: Annotated[
        list[str] | None,
        Argument(help="direct, gateway, and the names that --list shows. Default: all that are installed."),
    ] = None
    list_: Annotated[bool, option(_ARMS, "List which proxies are installed, and how to have the others.", "--list")] = (
        False
    )
    install: Annotated[
        list[str] | None,
        option(
            _ARMS,
            "Install a proxy by pip into an environment of its own: NAME, or NAME=WHAT as pip"
            " takes it; may be given again.",
        ),
    ] = None
    peers: Annotated[Path, option(_ARMS, "Folder of the proxies' environments, one of each name.", file_okay=False)] = (
        PEERS_DIR
    )
    gateway_config: Annotated[
        Path | None, option(_ARMS, "A gateway's file, but for its addresses and backends.", exists=True, dir_okay=False)
    ] = None
    engine: Annotated[
        Kind, option(_ENGINES, "Engines that are started for this: simulated, or real vLLM on the CPU.")
    ] = Kind.SIM
    engines: Annotated[int, option(_ENGINES, "How many.", min=1)] = 2
    model: Annotated[str | None, option(_ENGINES, f"vllm: its folder (default {_REAL_MODEL}). Else its name.")] = None
    kv_tokens: Annotated[int, option(_ENGINES, "KV cache of each engine.", min=1024)] = 65_536
    max_num_seqs: Annotated[int, option(_ENGINES, "Sequences that each engine runs at once.", min=1)] = 32
    max_model_len: Annotated[
        int | None, option(_ENGINES, "vllm: longest sequence, below --kv-tokens. Default: what the model can.", min=64)
    ] = None
    backends: Annotated[
        str | None,
        option(
            _ENGINES,
            "URLs between commas of vLLM servers that run already and that nothing else uses, instead of starting any.",
        ),
    ] = None
    overhead: Annotated[
        Overheads,
        option(
            _ENGINES,
            "Cost of requests and of streams, apart from the workload; auto: with simulated"
            " engines, which leave time for it.",
        ),
    ] = Overheads.AUTO
    pairs: Annotated[
        int, option(_ENGINES, "Single requests with and without the proxy, for the added latency.", min=0)
    ] = _OVERHEAD_PAIRS

    killed: Annotated[
        Killing,
        option(
            _AWAY,
            "Take one of the engines away under each proxy, after the workload or instead of it:"
            " killed and started again, and hanging.",
        ),
    ] = Killing.NO
    killed_seconds: Annotated[
        float | None,
        option(
            _AWAY,
            "How long each such load is, of which the engine is away for"
            f" a third (default: {usual(Kind.SIM).seconds:g}, vllm: {usual(Kind.VLLM).seconds:g}).",
            min=_SHORTEST_SECONDS,
        ),
    ] = None

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
            kv_tokens=self.kv_tokens,
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
