"""The options of `loadtest run`, listed once: their types, defaults, help, and what they mean as a plan."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, model_validator
from typer import Argument, Option

from loadtest.drive.plan import Arrivals, MixPart, Plan
from loadtest.drive.spelling import Load, bounds_of, json_object, loads_of, pages_of, shares_of, slo_of, targets_of
from loadtest.drive.target import Target, base_url
from loadtest.report.schema import Bounds
from loadtest.workloads.prompts import Endpoint, SourceFile, WorkloadKind, WorkloadSpec
from loadtest.workloads.sources import exchanges_of, trace_of

DEFAULT_DURATION_SECONDS = 30.0
_MOST_AUTO_WORKERS = 8
_BYTES_PER_TOKEN = 4.5
_BURSTINESS = 0.5
_FROM_DATASETS = (WorkloadKind.SHAREGPT, WorkloadKind.SESSIONS)
_LOAD, _TARGET, _PROMPTS, _OUTCOME = "Load", "Target", "Prompts", "Verdict and results"


def _option(*names: str, panel: str, text: str, **more: Any) -> Any:
    return Option(*names, rich_help_panel=panel, help=text, **more)


class RunOptions(BaseModel):
    """What the user asked for, as typed."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    url: Annotated[
        str | None, Argument(help="Base URL of a gateway or a vLLM server, with or without /v1; or see --targets.")
    ] = None

    concurrency: Annotated[
        str | None,
        _option("--concurrency", "-c", panel=_LOAD, text="Closed loop of N users; A:B from A to B; 8,16 one by one."),
    ] = None
    rate: Annotated[
        str | None,
        _option("--rate", "-r", panel=_LOAD, text="Open loop of R requests/s; A:B from A to B; 5,10 one by one."),
    ] = None
    ramp: Annotated[
        float | None, _option(panel=_LOAD, text="Seconds in which A becomes B. Default: all of --duration.")
    ] = None
    arrivals: Annotated[
        Arrivals, _option(panel=_LOAD, text="Open loop: how arrivals are spaced; they are never rescaled.")
    ] = Arrivals.POISSON
    burstiness: Annotated[
        float | None, _option(panel=_LOAD, text="gamma: shape of the gaps; below 1 comes in bursts. Default: 0.5.")
    ] = None
    trace: Annotated[
        Path | None,
        _option(
            exists=True, dir_okay=False, panel=_LOAD,
            text="Mooncake's JSONL or a derivative, sessions, or Azure's CSV: its requests, at its times without -c or"
            " -r.",
        ),
    ] = None  # fmt: skip
    trace_speed: Annotated[float, _option(min=0.001, panel=_LOAD, text="The trace's times pass so much faster.")] = 1.0
    trace_block: Annotated[
        int | None, _option(min=1, panel=_LOAD, text="Tokens of a hash_ids block. Default: as the format has it.")
    ] = None
    duration: Annotated[
        float | None,
        _option("--duration", "-d", panel=_LOAD, text="Seconds to send for. Default: 30 without --requests."),
    ] = None
    requests: Annotated[
        int | None, _option("--requests", "-n", min=1, panel=_LOAD, text="Requests (or sessions) to send.")
    ] = None
    max_in_flight: Annotated[
        int, _option(min=1, panel=_LOAD, text="Open loop: arrivals above this are dropped, and the run is invalid.")
    ] = 10_000
    workers: Annotated[str, _option(panel=_LOAD, text="Client processes; auto is half of the cores.")] = "1"
    repeat: Annotated[
        int, _option(min=1, panel=_LOAD, text="Times each load and target is run, in turns; 3 or more show the spread.")
    ] = 1
    timeout: Annotated[float, _option(panel=_LOAD, text="Seconds a request may take.")] = 600.0
    warmup: Annotated[int, _option(min=0, panel=_LOAD, text="Requests before, with prompts no other shares.")] = 4

    endpoint: Annotated[Endpoint, _option("--endpoint", "-e", panel=_TARGET, text="What to call.")] = Endpoint.CHAT
    targets: Annotated[
        str | None, _option(panel=_TARGET, text="Several to compare, in turns: direct=URL,gateway=URL.")
    ] = None
    model: Annotated[str | None, _option(panel=_TARGET, text="Default: the first of /v1/models.")] = None
    embeddings_model: Annotated[
        str | None, _option(panel=_TARGET, text="The model of a mix's embeddings. Default: that of the rest.")
    ] = None
    stream: Annotated[bool, _option("--stream/--no-stream", panel=_TARGET, text="Token by token, or whole.")] = True
    api_key: Annotated[
        str | None, _option(envvar="LOADTEST_API_KEY", panel=_TARGET, text="Sent as a bearer token, never recorded.")
    ] = None
    metrics_url: Annotated[
        str | None,
        _option(
            panel=_TARGET,
            text="Prometheus pages, URL or NAME=URL between commas, read once a second. Default: /metrics of an"
            " engine.",
        ),
    ] = None

    backends: Annotated[
        str | None,
        _option(
            panel=_TARGET,
            text="For the checkpoint: the engines behind a gateway, URL or NAME=URL between commas. Default: as the"
            " gateway's admin port reports.",
        ),
    ] = None
    admin_url: Annotated[
        str | None,
        _option(panel=_TARGET, text="For the checkpoint: the gateway's admin port. Default: found, if it is local."),
    ] = None

    workload: Annotated[
        WorkloadKind | None,
        _option(
            "--workload",
            "-w",
            panel=_PROMPTS,
            text="Shape of the prompts. Default: shared-prefix; trace, sharegpt and"
            " texts where a trace, a dataset and embeddings are asked for.",
        ),
    ] = None
    mix: Annotated[
        str | None,
        _option(panel=_PROMPTS, text="Several at once by share, as endpoints or workloads: chat=0.8,embeddings=0.2."),
    ] = None
    dataset: Annotated[
        Path | None,
        _option(
            exists=True, dir_okay=False, panel=_PROMPTS,
            text="sharegpt, sessions: a JSON file in ShareGPT's form. Default: made-up words, lengths as in ShareGPT.",
        ),
    ] = None  # fmt: skip
    turns: Annotated[str, _option(panel=_PROMPTS, text="sessions: turns of each, N or LOW:HIGH.")] = "2:6"
    think: Annotated[
        float, _option(min=0, panel=_PROMPTS, text="sessions: mean seconds between an answer and the next turn.")
    ] = 0.0
    inputs: Annotated[
        str | None, _option(panel=_PROMPTS, text="embeddings: texts of a request, N or LOW:HIGH. Default: 1.")
    ] = None
    groups: Annotated[int, _option(min=1, panel=_PROMPTS, text="How many distinct prefixes there are.")] = 8
    prefix_tokens: Annotated[int, _option(min=1, panel=_PROMPTS, text="Length of each prefix.")] = 1024
    tail_tokens: Annotated[int, _option(min=1, panel=_PROMPTS, text="Length of what each prompt has alone.")] = 64
    bytes_per_token: Annotated[
        float | None,
        _option(min=0.1, panel=_PROMPTS, text="Turns tokens into bytes. Default: as /tokenize says, else 4.5."),
    ] = None
    max_tokens: Annotated[int, _option(min=1, panel=_PROMPTS, text="Output length in tokens.")] = 128
    output_spread: Annotated[
        float, _option(min=0, max=0.99, panel=_PROMPTS, text="Output lengths vary by this share, so that users drift.")
    ] = 0.2
    ignore_eos: Annotated[
        bool, _option("--ignore-eos/--no-ignore-eos", panel=_PROMPTS, text="Generate the whole length, always.")
    ] = True
    cache_salt: Annotated[
        str, _option(panel=_PROMPTS, text="auto: every run finds a cold prefix cache; off; or the salt itself.")
    ] = "auto"
    extra_body: Annotated[str, _option(panel=_PROMPTS, text="JSON object merged into every request.")] = "{}"
    seed: Annotated[int | None, _option(panel=_PROMPTS, text="Default: drawn, and recorded.")] = None

    slo: Annotated[
        str | None,
        _option(
            panel=_OUTCOME,
            text="ttft=0.5,tpot=0.05,e2e=9,p=0.95: bounds in seconds, some or all, for that share of what is offered.",
        ),
    ] = None
    max_error_ratio: Annotated[
        float, _option(min=0, max=1, panel=_OUTCOME, text="Share of requests that may fail.")
    ] = 0.0
    out: Annotated[
        Path | None, _option("--out", "-o", file_okay=False, panel=_OUTCOME, text="Folder for results and report.")
    ] = None
    verify: Annotated[
        bool,
        _option("--verify/--no-verify", panel=_OUTCOME, text="With --out: after each run, check what the servers do."),
    ] = True

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.concurrency is not None and self.rate is not None:
            raise ValueError("give either --concurrency (closed loop) or --rate (open loop)")
        if self.concurrency is None and self.rate is None and self.trace is None:
            raise ValueError("give --concurrency (closed loop), --rate (open loop), or --trace")
        ramps = ":" in (self.concurrency or self.rate or "")
        if self.ramp is not None and not ramps:
            raise ValueError("--ramp is for a load from A to B, such as -r 5:50 or -c 4:64")
        self.loads()
        targets_of(self.url, self.targets)
        slo_of(self.slo)
        if self.trace_speed != 1 and (self.trace is None or self.concurrency or self.rate):
            raise ValueError("--trace-speed is for a --trace at its own times, without -c and -r")
        if self.burstiness is not None and (self.arrivals is not Arrivals.GAMMA or self.burstiness <= 0):
            raise ValueError("--burstiness is above 0 and belongs to --arrivals gamma")
        if (self.duration is not None and self.duration <= 0) or self.timeout <= 0:
            raise ValueError("--duration and --timeout must be above 0")
        if self.workers != "auto" and not (self.workers.isdecimal() and int(self.workers) > 0):
            raise ValueError("--workers must be auto or a number from 1")
        json_object(self.extra_body)
        self._check_prompts()
        return self

    def _check_prompts(self) -> None:
        kinds = [kind for _, _, _, kind in self._parts()]
        if (WorkloadKind.TRACE in kinds) != (self.trace is not None) or (self.mix and self.trace):
            raise ValueError("--workload trace and --trace FILE belong together, and not into a mix")
        if self.dataset is not None and not {WorkloadKind.SHAREGPT, WorkloadKind.SESSIONS} & set(kinds):
            raise ValueError("--dataset is for --workload sharegpt or sessions")
        if self.inputs is not None and WorkloadKind.TEXTS not in kinds:
            raise ValueError("--inputs is for embeddings: -e embeddings, or a part of --mix")
        for _, _, endpoint, kind in self._parts():
            if (endpoint is Endpoint.EMBEDDINGS) and kind is WorkloadKind.SESSIONS:
                raise ValueError("embeddings have no sessions")
            if (endpoint is not Endpoint.EMBEDDINGS) and kind is WorkloadKind.TEXTS:
                raise ValueError("--workload texts is for -e embeddings")
        bounds_of(self.turns, "--turns")
        bounds_of(self.inputs or "1", "--inputs")

    def _parts(self) -> list[tuple[str, float, Endpoint, WorkloadKind]]:
        """Name, share, endpoint and workload of everything that is sent. Raises ValueError."""
        if self.mix is None:
            return [("", 1.0, self.endpoint, self._kind(self.endpoint))]
        made = []
        for name, share in shares_of(self.mix):
            if name in list(Endpoint):
                made.append((name, share, Endpoint(name), self._kind(Endpoint(name))))
            else:
                kind = WorkloadKind(name)
                made.append((name, share, Endpoint.EMBEDDINGS if kind is WorkloadKind.TEXTS else self.endpoint, kind))
        return made

    def _kind(self, endpoint: Endpoint) -> WorkloadKind:
        """The workload where none is named."""
        if self.workload is not None and not (self.mix and endpoint is Endpoint.EMBEDDINGS):
            return self.workload
        if endpoint is Endpoint.EMBEDDINGS:
            return WorkloadKind.TEXTS
        if self.trace is not None:
            return WorkloadKind.TRACE
        return WorkloadKind.SHAREGPT if self.dataset is not None else WorkloadKind.SHARED_PREFIX

    @property
    def target_urls(self) -> dict[str, str]:
        """By name; a single one has none."""
        return targets_of(self.url, self.targets)

    @property
    def engine_urls(self) -> dict[str, str]:
        return {name: base_url(url) for name, url in pages_of(self.backends or "").items()}

    @property
    def bounds(self) -> Bounds:
        """What the run must keep to."""
        return Bounds(**slo_of(self.slo), max_error_ratio=self.max_error_ratio)

    def pages(self, target: Target) -> dict[str, str]:
        """Metrics pages by name; those behind the target are read too, under the names that the user gave, if any."""
        pages = {"engine": target.metrics_url} if target.metrics_url else {}
        if self.metrics_url is not None:
            pages = pages_of(self.metrics_url)
        return pages | {name: url for name, url in target.pages_behind.items() if url not in pages.values()}

    def loads(self) -> list[Load]:
        """Each is a run of its own."""
        by_default = self.duration or (None if self.requests else DEFAULT_DURATION_SECONDS)
        return loads_of(self.concurrency, self.rate, self.trace_speed, self.ramp or by_default)

    @property
    def runs(self) -> int:
        """How many runs this comes to."""
        return len(self.target_urls) * len(self.loads()) * self.repeat

    def check_files(self) -> None:
        """Reads the files once, so that a bad one fails before anything starts. Raises TraceError, DatasetError."""
        for _, _, _, kind in self._parts():
            if self.trace is not None:
                trace_of(self._workload(kind, None, 0))
            elif self.dataset is not None and kind in _FROM_DATASETS:
                exchanges_of(self._workload(kind, None, 0))

    def drawn_seed(self) -> int:
        """The seed, drawn where none is given."""
        return secrets.randbelow(2**31) if self.seed is None else self.seed

    def plan(self, url: str, target: Target, load: Load, seed: int, cpus: int | None = os.cpu_count()) -> Plan:
        """The plan for a target that was looked at; the salt is drawn here, so that each run has its own."""
        unbounded = self.duration is None and self.requests is None and self.trace is None
        model = self.model or target.models[0]
        parts = [
            MixPart(
                name=name,
                share=share,
                endpoint=endpoint,
                stream=self.stream and endpoint is not Endpoint.EMBEDDINGS,
                model=(self.mix and endpoint is Endpoint.EMBEDDINGS and self.embeddings_model) or model,
                workload=self._workload(kind, target.bytes_per_token, seed + number),
            )
            for number, (name, share, endpoint, kind) in enumerate(self._parts())
        ]
        return Plan(
            url=url,
            endpoint=parts[0].endpoint,
            model=model,
            stream=parts[0].stream,
            **load.fields,
            arrivals=self.arrivals,
            burstiness=self.burstiness or (_BURSTINESS if self.arrivals is Arrivals.GAMMA else 1.0),
            duration_seconds=DEFAULT_DURATION_SECONDS if unbounded else self.duration,
            requests=self.requests,
            max_in_flight=self.max_in_flight,
            ignore_eos=self.ignore_eos,
            cache_salt={"auto": secrets.token_hex(8), "off": None}.get(self.cache_salt, self.cache_salt),
            extra_body=json_object(self.extra_body),
            timeout_seconds=self.timeout,
            warmup_requests=self.warmup,
            workers=self._worker_count(cpus or 1, load),
            workload=parts[0].workload,
            mix=parts if self.mix else [],
            api_key=self.api_key,
        )

    def _worker_count(self, cpus: int, load: Load) -> int:
        wanted = max(1, min(_MOST_AUTO_WORKERS, cpus // 2)) if self.workers == "auto" else int(self.workers)
        users: list[int] = [load.fields[name] for name in ("concurrency", "first_concurrency") if load.fields.get(name)]
        # Each worker sends its own part of the requests, and cannot once its last user has left.
        ends_by_count = self.requests is not None or self.trace is not None
        return min([wanted, *users[:1]] if ends_by_count else [wanted, max(users, default=wanted)])

    def _workload(self, kind: WorkloadKind, measured: float | None, seed: int) -> WorkloadSpec:
        path = self.trace or (self.dataset if kind in _FROM_DATASETS else None)
        return WorkloadSpec(
            kind=kind,
            file=_source_file(path) if path else None,
            block_tokens=self.trace_block,
            turns=bounds_of(self.turns, "--turns"),
            think_seconds=self.think,
            inputs=bounds_of(self.inputs or "1", "--inputs"),
            groups=self.groups,
            prefix_tokens=self.prefix_tokens,
            tail_tokens=self.tail_tokens,
            bytes_per_token=self.bytes_per_token or measured or _BYTES_PER_TOKEN,
            max_tokens=self.max_tokens,
            output_spread=self.output_spread,
            seed=seed,
        )


def _source_file(path: Path) -> SourceFile:
    with path.open("rb") as file:
        return SourceFile(path=str(path.resolve()), sha256=hashlib.file_digest(file, "sha256").hexdigest())
