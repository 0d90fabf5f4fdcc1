"""The options of `loadtest run`, listed once: types, defaults, help, how their values are written, and their plan."""

from __future__ import annotations

import math
import os
import secrets
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from typer import Argument

from loadtest.access import Access
from loadtest.console import option
from loadtest.drive.plan import Arrivals, MixPart, Plan
from loadtest.drive.search import Aim
from loadtest.drive.spelling import (
    Load,
    bounds_of,
    json_object,
    loads_of,
    pages_of,
    shares_of,
    slo_of,
    targets_of,
    until_of,
)
from loadtest.drive.target import Target, base_url
from loadtest.report.schema import Bounds
from loadtest.workloads.audio import audio_files
from loadtest.workloads.bodies import BodyFile, DatasetError, first_body
from loadtest.workloads.prompts import Endpoint, Recorded, SourceFile, WorkloadKind, WorkloadSpec
from loadtest.workloads.sources import exchanges_of, trace_of
from loadtest.workloads.tokens import TokenizerError, load_tokenizer

DEFAULT_DURATION_SECONDS = 30.0
BATCH_SIZES = "1,8,32"  # users, where no load is given
_MOST_UNTIL = 20
_MOST_AUTO_WORKERS = 8
_TOKENS_OF_A_WORKER = 40_000  # a second, well within the capacity of one worker
_FAST_STREAM = 100  # tokens a second
_BYTES_PER_TOKEN = 4.5
_BURSTINESS = 0.5
_FROM_DATASETS = (WorkloadKind.BODIES, WorkloadKind.SHAREGPT, WorkloadKind.SESSIONS, WorkloadKind.AUDIO)
_ENDPOINT_OF = {WorkloadKind.TEXTS: Endpoint.EMBEDDINGS, WorkloadKind.AUDIO: Endpoint.TRANSCRIPTIONS}
_LOAD, _TARGET, _PROMPTS, _OUTCOME = "Load", "Target", "Prompts", "Verdict and results"


class RunOptions(BaseModel):
    """The user's options, as typed."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    url: Annotated[
        str | None, Argument(help="Base URL of a gateway or a vLLM server, with or without /v1; or see --targets.")
    ] = None

    concurrency: Annotated[
        str | None, option(_LOAD, "Closed loop of N users; A:B from A to B; 8,16 one by one.", "--concurrency", "-c")
    ] = None
    rate: Annotated[
        str | None, option(_LOAD, "Open loop of R requests/s; A:B from A to B; 5,10 one by one.", "--rate", "-r")
    ] = None
    ramp: Annotated[float | None, option(_LOAD, "Seconds in which A becomes B. Default: all of --duration.")] = None
    arrivals: Annotated[Arrivals, option(_LOAD, "Open loop: how arrivals are spaced; they are never rescaled.")] = (
        Arrivals.POISSON
    )
    burstiness: Annotated[
        float | None, option(_LOAD, "gamma: shape of the gaps; below 1 comes in bursts. Default: 0.5.")
    ] = None
    trace: Annotated[
        Path | None,
        option(
            _LOAD,
            "Mooncake's JSONL or a derivative, sessions, Azure's CSV, or JSONL of OpenAI bodies with `timestamp`: its"
            " requests, at its times without -c or -r.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    trace_speed: Annotated[float, option(_LOAD, "The trace's times pass so much faster.", min=0.001)] = 1.0
    trace_block: Annotated[
        int | None, option(_LOAD, "Tokens of a hash_ids block. Default: as the format has it.", min=1)
    ] = None
    duration: Annotated[
        float | None, option(_LOAD, "Seconds to send for. Default: 30 without --requests.", "--duration", "-d")
    ] = None
    requests: Annotated[int | None, option(_LOAD, "Requests (or sessions) to send.", "--requests", "-n", min=1)] = None
    max_in_flight: Annotated[
        int, option(_LOAD, "Open loop: arrivals above this are dropped, and the run is invalid.", min=1)
    ] = 10_000
    workers: Annotated[
        str, option(_LOAD, "Client processes; auto: as many as the load needs, up to half of the cores.")
    ] = "auto"
    repeat: Annotated[
        int | None,
        option(_LOAD, "Times each load and target is run, in turns. Default: 1; with --until at most 20.", min=1),
    ] = None
    until: Annotated[
        str | None, option(_LOAD, "Repeat until the 95 % confidence interval is so narrow to either side, such as 3%.")
    ] = None
    find: Annotated[
        Aim | None, option(_LOAD, "Search for the highest load that keeps --slo, instead of -c and -r.")
    ] = None
    timeout: Annotated[float, option(_LOAD, "Seconds a request may take.")] = 600.0
    warmup: Annotated[int, option(_LOAD, "Requests before, with prompts no other shares.", min=0)] = 4

    endpoint: Annotated[Endpoint, option(_TARGET, "What to call.", "--endpoint", "-e")] = Endpoint.CHAT
    targets: Annotated[str | None, option(_TARGET, "Several to compare, in turns: direct=URL,gateway=URL.")] = None
    model: Annotated[str | None, option(_TARGET, "Default: the first of /v1/models.")] = None
    embeddings_model: Annotated[
        str | None, option(_TARGET, "The model of a mix's embeddings. Default: that of the rest.")
    ] = None
    stream: Annotated[
        bool | None,
        option(
            _TARGET,
            "Token by token, or whole. Default: token by token; whole for audio; bodies of a file as they are.",
            "--stream/--no-stream",
        ),
    ] = None
    api_key: Annotated[
        str | None, option(_TARGET, "Sent as a bearer token, never recorded.", envvar="LOADTEST_API_KEY")
    ] = None
    header: Annotated[
        list[str], option(_TARGET, "NAME:VALUE of every request, never recorded; several times for several.")
    ] = []
    insecure: Annotated[bool, option(_TARGET, "Accept any certificate of a server.", "--insecure")] = False
    cacert: Annotated[
        Path | None,
        option(_TARGET, "PEM file of the certificates to trust, instead of the system's.", exists=True, dir_okay=False),
    ] = None
    metrics_url: Annotated[
        str | None,
        option(
            _TARGET,
            "Prometheus pages, URL or NAME=URL between commas, read once a second. Default: /metrics of an engine.",
        ),
    ] = None

    backends: Annotated[
        str | None,
        option(
            _TARGET,
            "For the checkpoint: the engines behind a gateway, URL or NAME=URL between commas. Default: as the"
            " gateway's admin port reports.",
        ),
    ] = None
    admin_url: Annotated[
        str | None, option(_TARGET, "For the checkpoint: the gateway's admin port. Default: found, if it is local.")
    ] = None

    workload: Annotated[
        WorkloadKind | None,
        option(
            _PROMPTS,
            "Shape of the prompts. Default: shared-prefix; as the file of --trace or --dataset has it; texts for"
            " embeddings, rerank and score; audio for transcriptions and translations.",
            "--workload",
            "-w",
        ),
    ] = None
    mix: Annotated[
        str | None, option(_PROMPTS, "Several at once by share, as endpoints or workloads: chat=0.8,embeddings=0.2.")
    ] = None
    dataset: Annotated[
        Path | None,
        option(
            _PROMPTS,
            "JSONL of OpenAI bodies or batch lines: its requests as they are (with -w sessions turn by turn); or"
            " ShareGPT's JSON or JSONL (sharegpt, sessions); or a folder of audio, or JSONL with `audio`, its path."
            " Default: made-up words, lengths as in ShareGPT.",
            exists=True,
        ),
    ] = None
    turns: Annotated[str, option(_PROMPTS, "sessions: turns of each, N or LOW:HIGH.")] = "2:6"
    think: Annotated[float, option(_PROMPTS, "sessions: mean seconds between an answer and the next turn.", min=0)] = (
        0.0
    )
    inputs: Annotated[
        str | None, option(_PROMPTS, "embeddings, rerank, score: texts of a request, N or LOW:HIGH. Default: 1.")
    ] = None
    audio_seconds: Annotated[
        str,
        BeforeValidator(str),
        option(_PROMPTS, "transcriptions, translations: length of made-up audio, N or LOW:HIGH."),
    ] = "10"
    groups: Annotated[int, option(_PROMPTS, "How many distinct prefixes there are.", min=1)] = 8
    prefix_tokens: Annotated[int, option(_PROMPTS, "Length of each prefix.", min=1)] = 1024
    tail_tokens: Annotated[
        str,
        BeforeValidator(str),
        option(_PROMPTS, "Length of what each prompt has alone, N or LOW:HIGH (even in the logarithm)."),
    ] = "64"
    tokenizer: Annotated[
        str | None,
        option(
            _PROMPTS,
            "The model's tokenizer, as tokenizer.json, folder or name: makes prompts of exact numbers of tokens.",
        ),
    ] = None
    bytes_per_token: Annotated[
        float | None, option(_PROMPTS, "Turns tokens into bytes. Default: as /tokenize says, else 4.5.", min=0.1)
    ] = None
    max_tokens: Annotated[int, option(_PROMPTS, "Output length in tokens.", min=1)] = 128
    output_spread: Annotated[
        float, option(_PROMPTS, "Output lengths vary by this share, so that users drift.", min=0, max=0.99)
    ] = 0.2
    ignore_eos: Annotated[
        bool, option(_PROMPTS, "Generate the whole length, always.", "--ignore-eos/--no-ignore-eos")
    ] = True
    cache_salt: Annotated[
        str, option(_PROMPTS, "auto: every run finds a cold prefix cache; off; or the salt itself.")
    ] = "auto"
    extra_body: Annotated[str, option(_PROMPTS, "JSON object merged into every request.")] = "{}"
    seed: Annotated[int | None, option(_PROMPTS, "Default: drawn, and recorded.")] = None

    slo: Annotated[
        str | None,
        option(
            _OUTCOME,
            "ttft=0.5,tpot=0.05,e2e=9,p=0.95: bounds in seconds, some or all, for that share of what is offered;"
            " gpu=85: the least mean GPU utilisation in percent.",
        ),
    ] = None
    max_error_ratio: Annotated[float, option(_OUTCOME, "Share of requests that may fail.", min=0, max=1)] = 0.0
    out: Annotated[Path | None, option(_OUTCOME, "Folder for results and report.", "--out", "-o", file_okay=False)] = (
        None
    )
    verify: Annotated[
        bool, option(_OUTCOME, "With --out: after each run, check what the servers do.", "--verify/--no-verify")
    ] = True

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.concurrency is not None and self.rate is not None:
            raise ValueError("give either --concurrency (closed loop) or --rate (open loop)")
        self._check_search()
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
        _ = self.access
        self._check_prompts()
        return self

    def _check_search(self) -> None:
        until_of(self.until)
        if self.find is None:
            return
        if self.concurrency or self.rate or self.trace or self.targets or self.repeat or self.until:
            raise ValueError("--find chooses the loads itself: give it one URL, and no -c, -r, --trace or --repeat")
        bounds = slo_of(self.slo)
        if "gpu_percent" in bounds:
            raise ValueError(
                "--find looks for the highest load, and gpu= in --slo is kept by high loads only: leave it out"
            )
        if not bounds:
            raise ValueError("--find needs the limits to keep, such as --slo ttft=0.5,tpot=0.05")

    def _check_prompts(self) -> None:
        kinds = [kind for _, _, _, kind in self._parts()]
        of_traces = {WorkloadKind.TRACE, WorkloadKind.BODIES} & set(kinds)
        if (WorkloadKind.TRACE in kinds and self.trace is None) or (self.trace is not None and not of_traces):
            raise ValueError("--workload trace and --trace FILE belong together, and not into a mix")
        if WorkloadKind.BODIES in kinds and (self.trace or self.dataset) is None:
            raise ValueError("--workload bodies needs a file of requests: --dataset FILE, or --trace FILE with times")
        if self.sends_bodies and not {WorkloadKind.BODIES, WorkloadKind.SESSIONS} & set(kinds):
            raise ValueError("the file holds requests: leave out --workload, or give --workload sessions")
        if self.dataset is not None and (self.trace is not None or not set(_FROM_DATASETS) & set(kinds)):
            raise ValueError("--dataset is for --workload bodies, sharegpt, sessions or audio, and not beside --trace")
        if self.dataset is not None and self.dataset.is_dir() and WorkloadKind.AUDIO not in kinds:
            raise ValueError("a folder as --dataset holds audio: give -e transcriptions or translations")
        if self.inputs is not None and WorkloadKind.TEXTS not in kinds:
            raise ValueError("--inputs is for -e embeddings, rerank or score, or a part of --mix")
        for _, _, endpoint, kind in self._parts():
            if not endpoint.generates and kind is WorkloadKind.SESSIONS:
                raise ValueError(f"{endpoint} has no sessions")
            if kind is WorkloadKind.TEXTS and endpoint.streams:
                raise ValueError("--workload texts is for -e embeddings, rerank or score")
            if endpoint.takes_audio != (kind is WorkloadKind.AUDIO):
                raise ValueError("--workload audio and -e transcriptions or translations belong together")
        bounds_of(self.turns, "--turns")
        bounds_of(self.inputs or "1", "--inputs")
        bounds_of(self.tail_tokens, "--tail-tokens")
        bounds_of(self.audio_seconds, "--audio-seconds")

    def _parts(self) -> list[tuple[str, float, Endpoint, WorkloadKind]]:
        """Name, share, endpoint and workload of everything that is sent. Raises ValueError."""
        if self.mix is None:
            endpoint = self._first_body.endpoint if self._first_body is not None else self.endpoint
            return [("", 1.0, endpoint, self._kind(endpoint))]
        made = []
        for name, share in shares_of(self.mix):
            if name in list(Endpoint):
                made.append((name, share, Endpoint(name), self._kind(Endpoint(name))))
            else:
                kind = WorkloadKind(name)
                made.append((name, share, _ENDPOINT_OF.get(kind, self.endpoint), kind))
        return made

    def _kind(self, endpoint: Endpoint) -> WorkloadKind:
        """The workload where none is named."""
        if self.workload is not None and not (self.mix and not endpoint.generates):
            return self.workload
        if self.mix is None and self._first_body is not None:
            return WorkloadKind.BODIES
        if not endpoint.generates:
            return WorkloadKind.AUDIO if endpoint.takes_audio else WorkloadKind.TEXTS
        if self.trace is not None:
            return WorkloadKind.TRACE
        return WorkloadKind.SHAREGPT if self.dataset is not None else WorkloadKind.SHARED_PREFIX

    @cached_property
    def _first_body(self) -> Recorded | None:
        """The first request of the file, if it has requests."""
        path = self.trace or self.dataset
        return None if path is None or self.endpoint.takes_audio else first_body(path)

    @property
    def sends_bodies(self) -> bool:
        """Whether requests are sent unchanged from a file."""
        return self._first_body is not None and self.mix is None

    @property
    def target_urls(self) -> dict[str, str]:
        """By name; a single one has none."""
        return targets_of(self.url, self.targets)

    @property
    def access(self) -> Access:
        """The headers of every request to the targets, and the trusted certificates."""
        return Access.of(self.api_key, self.header, insecure=self.insecure, ca_file=self.cacert)

    @property
    def engine_urls(self) -> dict[str, str]:
        return {name: base_url(url) for name, url in pages_of(self.backends or "").items()}

    @property
    def bounds(self) -> Bounds:
        """The conditions for the run to pass."""
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
        nothing = self.rate is None and self.trace is None
        return loads_of(
            self.concurrency or (BATCH_SIZES if nothing else None), self.rate, self.trace_speed, self.ramp or by_default
        )

    @property
    def runs(self) -> int:
        """How many runs this comes to."""
        return len(self.target_urls) * len(self.loads()) * self.repetitions

    @property
    def repetitions(self) -> int:
        """How often each load is run at most."""
        return self.repeat or (1 if self.until is None else _MOST_UNTIL)

    @property
    def narrow_to(self) -> float | None:
        """The share of the mean that a confidence interval may reach to either side; None: `repetitions` are enough."""
        return until_of(self.until)

    def check_files(self) -> None:
        """Reads the files once, so that a bad one fails before anything starts.

        Raises TraceError, DatasetError.
        """
        try:
            _ = None if self.tokenizer is None else load_tokenizer(self.tokenizer)
        except TokenizerError as error:
            raise DatasetError(str(error)) from None
        for _, _, _, kind in self._parts():
            path = self.trace or self.dataset
            if path is not None and (self.sends_bodies or kind is WorkloadKind.BODIES):
                timed = BodyFile(path, check=True).arrivals_seconds
                if self.trace is not None and not timed and self.concurrency is None and self.rate is None:
                    raise DatasetError(f"{path}: lines have no timestamp; give -c or -r, or the file as --dataset")
            elif self.trace is not None:
                trace_of(self._workload(kind, None, 0))
            elif self.dataset is not None and kind is WorkloadKind.AUDIO:
                audio_files(self.dataset)
            elif self.dataset is not None and kind in _FROM_DATASETS:
                exchanges_of(self._workload(kind, None, 0))

    def drawn_seed(self) -> int:
        """The seed, drawn where none is given."""
        return secrets.randbelow(2**31) if self.seed is None else self.seed

    def plan(self, url: str, target: Target, load: Load, seed: int, cpus: int | None = os.cpu_count()) -> Plan:
        """The plan for a target that was looked at; the salt is drawn here, so that each run has its own."""
        unbounded = self.duration is None and self.requests is None and self.trace is None
        model = self.model or self._own_model or target.models[0]
        parts = [
            MixPart(
                name=name,
                share=share,
                endpoint=endpoint,
                stream=endpoint.streams and (endpoint.generates if self.stream is None else self.stream),
                model=(self.mix and not endpoint.streams and self.embeddings_model) or model,
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
            ignore_eos=self.ignore_eos and not self.sends_bodies,
            cache_salt={"auto": secrets.token_hex(8), "off": None}.get(self.cache_salt, self.cache_salt),
            extra_body=self._extra_body,
            timeout_seconds=self.timeout,
            warmup_requests=self.warmup,
            workers=self._worker_count(cpus or 1, load),
            workload=parts[0].workload,
            mix=parts if self.mix else [],
            access=self.access,
        )

    @property
    def _own_model(self) -> str | None:
        """The model that the first request of the file names."""
        named = None if self._first_body is None else self._first_body.fields.get("model")
        return named if isinstance(named, str) else None

    @property
    def _extra_body(self) -> dict[str, Any]:
        """The fields merged into every request; for a file's requests also explicitly requested ones."""
        added: dict[str, Any] = {}
        if self.sends_bodies:
            added |= {"model": self.model} if self.model is not None else {}
            added |= {"stream": self.stream} if self.stream is not None else {}
        return added | json_object(self.extra_body)

    def _worker_count(self, cpus: int, load: Load) -> int:
        wanted = self._auto_workers(cpus, load) if self.workers == "auto" else int(self.workers)
        users: list[int] = [load.fields[name] for name in ("concurrency", "first_concurrency") if load.fields.get(name)]
        # Each worker sends its own part of the requests, and cannot once its last user has left.
        ends_by_count = self.requests is not None or self.trace is not None or self.sends_bodies
        return min([wanted, *users[:1]] if ends_by_count else [wanted, max(users, default=wanted)])

    def _auto_workers(self, cpus: int, load: Load) -> int:
        """The number of workers by the expected tokens a second, up to half of the cores."""
        users = max(load.fields.get("concurrency") or 0, load.fields.get("first_concurrency") or 0)
        rate = max(load.fields.get("rate_per_second") or 0.0, load.fields.get("first_rate_per_second") or 0.0)
        tokens_per_second = max(users * _FAST_STREAM, rate * self.max_tokens)
        return max(1, min(math.ceil(tokens_per_second / _TOKENS_OF_A_WORKER), _MOST_AUTO_WORKERS, cpus // 2))

    def _workload(self, kind: WorkloadKind, measured: float | None, seed: int) -> WorkloadSpec:
        path = self.trace or (self.dataset if kind in _FROM_DATASETS else None)
        low, high = bounds_of(self.tail_tokens, "--tail-tokens")
        return WorkloadSpec(
            kind=kind,
            file=SourceFile.of(path) if path else None,
            block_tokens=self.trace_block,
            turns=bounds_of(self.turns, "--turns"),
            think_seconds=self.think,
            inputs=bounds_of(self.inputs or "1", "--inputs"),
            audio_seconds=bounds_of(self.audio_seconds, "--audio-seconds") if kind is WorkloadKind.AUDIO else None,
            groups=self.groups,
            prefix_tokens=self.prefix_tokens,
            tail_tokens=low,
            most_tail_tokens=high if high > low else None,
            tokenizer=self.tokenizer,
            bytes_per_token=self.bytes_per_token or measured or _BYTES_PER_TOKEN,
            max_tokens=self.max_tokens,
            output_spread=self.output_spread,
            seed=seed,
        )
