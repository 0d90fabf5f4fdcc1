"""The options of `loadtest run`, listed once: their types, defaults, help, and what they mean as a plan."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, model_validator
from typer import Argument, Option

from loadtest.drive.plan import Arrivals, Plan
from loadtest.drive.target import Target, base_url
from loadtest.report.summarise import Bounds
from loadtest.workloads.body import Endpoint
from loadtest.workloads.spec import WorkloadKind, WorkloadSpec

_DEFAULT_DURATION_SECONDS = 30.0
_MOST_AUTO_WORKERS = 8
_BYTES_PER_TOKEN = 4.5
_LOAD, _TARGET, _PROMPTS, _OUTCOME = "Load", "Target", "Prompts", "Verdict and results"


def _option(*names: str, panel: str, told: str, **more: Any) -> Any:
    return Option(*names, rich_help_panel=panel, help=told, **more)


class RunOptions(BaseModel):
    """What the user asked for, as typed."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    url: Annotated[str, Argument(help="Base URL of a gateway or a vLLM server, with or without /v1.")]

    concurrency: Annotated[
        int | None, _option("--concurrency", "-c", min=1, panel=_LOAD, told="Closed loop of N users.")
    ] = None
    rate: Annotated[
        float | None, _option("--rate", "-r", panel=_LOAD, told="Open loop of R requests/s, whatever the answers do.")
    ] = None
    arrivals: Annotated[
        Arrivals, _option(panel=_LOAD, told="Open loop: how arrivals are spaced; they are never rescaled.")
    ] = Arrivals.POISSON
    duration: Annotated[
        float | None,
        _option("--duration", "-d", panel=_LOAD, told="Seconds to send for. Default: 30 without --requests."),
    ] = None
    requests: Annotated[int | None, _option("--requests", "-n", min=1, panel=_LOAD, told="Requests to send.")] = None
    max_in_flight: Annotated[
        int, _option(min=1, panel=_LOAD, told="Open loop: arrivals above this are dropped, and the run is invalid.")
    ] = 10_000
    workers: Annotated[str, _option(panel=_LOAD, told="Client processes; auto is half of the cores.")] = "1"
    timeout: Annotated[float, _option(panel=_LOAD, told="Seconds a request may take.")] = 600.0
    warmup: Annotated[int, _option(min=0, panel=_LOAD, told="Requests before, with prompts no other shares.")] = 4

    endpoint: Annotated[Endpoint, _option("--endpoint", "-e", panel=_TARGET, told="What to call.")] = Endpoint.CHAT
    model: Annotated[str | None, _option(panel=_TARGET, told="Default: the first of /v1/models.")] = None
    stream: Annotated[bool, _option("--stream/--no-stream", panel=_TARGET, told="Token by token, or whole.")] = True
    api_key: Annotated[
        str | None, _option(envvar="LOADTEST_API_KEY", panel=_TARGET, told="Sent as a bearer token, never recorded.")
    ] = None
    metrics_url: Annotated[
        str | None, _option(panel=_TARGET, told="Prometheus page, read before and after; changes are recorded.")
    ] = None

    workload: Annotated[WorkloadKind, _option("--workload", "-w", panel=_PROMPTS, told="Shape of the prompts.")] = (
        WorkloadKind.SHARED_PREFIX
    )
    groups: Annotated[int, _option(min=1, panel=_PROMPTS, told="shared-prefix: how many distinct prefixes.")] = 8
    prefix_tokens: Annotated[int, _option(min=1, panel=_PROMPTS, told="shared-prefix: length of each prefix.")] = 1024
    tail_tokens: Annotated[int, _option(min=1, panel=_PROMPTS, told="Length of what each prompt has alone.")] = 64
    bytes_per_token: Annotated[
        float | None,
        _option(min=0.1, panel=_PROMPTS, told="Turns tokens into bytes. Default: as /tokenize says, else 4.5."),
    ] = None
    max_tokens: Annotated[int, _option(min=1, panel=_PROMPTS, told="Output length.")] = 128
    output_spread: Annotated[
        float, _option(min=0, max=0.99, panel=_PROMPTS, told="Output lengths vary by this share, so that users drift.")
    ] = 0.2
    ignore_eos: Annotated[
        bool, _option("--ignore-eos/--no-ignore-eos", panel=_PROMPTS, told="Generate the whole length, always.")
    ] = True
    cache_salt: Annotated[
        str, _option(panel=_PROMPTS, told="auto: every run finds a cold prefix cache; off; or the salt itself.")
    ] = "auto"
    extra_body: Annotated[str, _option(panel=_PROMPTS, told="JSON object merged into every request.")] = "{}"
    seed: Annotated[int | None, _option(panel=_PROMPTS, told="Default: drawn, and recorded.")] = None

    slo_ttft_ms: Annotated[float | None, _option(panel=_OUTCOME, told="Bound on TTFT from the intended send.")] = None
    slo_tpot_ms: Annotated[float | None, _option(panel=_OUTCOME, told="Bound on TPOT.")] = None
    slo_attainment: Annotated[
        float, _option(min=0, max=1, panel=_OUTCOME, told="Share of offered requests that must keep the bounds.")
    ] = 0.95
    max_error_ratio: Annotated[
        float, _option(min=0, max=1, panel=_OUTCOME, told="Share of requests that may fail.")
    ] = 0.0
    out: Annotated[
        Path | None, _option("--out", "-o", file_okay=False, panel=_OUTCOME, told="Folder for results and report.")
    ] = None

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("give either --concurrency (closed loop) or --rate (open loop)")
        if self.rate is not None and self.rate <= 0:
            raise ValueError("--rate must be above 0")
        if (self.duration is not None and self.duration <= 0) or self.timeout <= 0:
            raise ValueError("--duration and --timeout must be above 0")
        if self.workers != "auto" and not (self.workers.isdecimal() and int(self.workers) > 0):
            raise ValueError("--workers must be auto or a number from 1")
        _json_object(self.extra_body)
        return self

    @property
    def target_url(self) -> str:
        """The URL without `/v1`."""
        return base_url(self.url)

    @property
    def bounds(self) -> Bounds:
        """What the run must keep to."""
        return Bounds(
            ttft_ms=self.slo_ttft_ms,
            tpot_ms=self.slo_tpot_ms,
            attainment=self.slo_attainment,
            max_error_ratio=self.max_error_ratio,
        )

    def plan(self, target: Target, cpus: int | None = os.cpu_count()) -> Plan:
        """The plan for a target that was looked at; what was left open is drawn or chosen here."""
        unbounded = self.duration is None and self.requests is None
        return Plan(
            url=self.target_url,
            endpoint=self.endpoint,
            model=self.model or target.models[0],
            stream=self.stream and self.endpoint is not Endpoint.EMBEDDINGS,
            concurrency=self.concurrency,
            rate_per_second=self.rate,
            arrivals=self.arrivals,
            duration_seconds=_DEFAULT_DURATION_SECONDS if unbounded else self.duration,
            requests=self.requests,
            max_in_flight=self.max_in_flight,
            ignore_eos=self.ignore_eos,
            cache_salt={"auto": secrets.token_hex(8), "off": None}.get(self.cache_salt, self.cache_salt),
            extra_body=_json_object(self.extra_body),
            timeout_seconds=self.timeout,
            warmup_requests=self.warmup,
            workers=self._worker_count(cpus or 1),
            workload=self._workload(target.bytes_per_token),
            api_key=self.api_key,
        )

    def _worker_count(self, cpus: int) -> int:
        wanted = max(1, min(_MOST_AUTO_WORKERS, cpus // 2)) if self.workers == "auto" else int(self.workers)
        return min(wanted, self.concurrency or wanted)

    def _workload(self, measured: float | None) -> WorkloadSpec:
        return WorkloadSpec(
            kind=self.workload,
            groups=self.groups,
            prefix_tokens=self.prefix_tokens,
            tail_tokens=self.tail_tokens,
            bytes_per_token=self.bytes_per_token or measured or _BYTES_PER_TOKEN,
            max_tokens=self.max_tokens,
            output_spread=self.output_spread,
            seed=secrets.randbelow(2**31) if self.seed is None else self.seed,
        )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("--extra-body must be a JSON object")
    return value
