"""The schema of results.json, and the versions of its figures' definitions.

Latencies are milliseconds, moments are seconds from the start of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

# 2: parts of a mix, stalls, samples, answers in one read; no ITL where tokens came packed.
# 3: p99 and TPOT over time, each backend's limit, each bound of the SLO by itself, checks one by one.
# 4: workers that were lost, versions of definitions.
# 5: a bound on GPU utilisation, overload as a part of the verdict.
# 6: intervals.
# 7: audio.
# Whatever reads this version reads older files as well.
SCHEMA_VERSION = 7


Interval = tuple[float, float]


class StrictModel(BaseModel):
    """A part of a document in which unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class FrozenModel(StrictModel):
    """A strict part of a document that does not change."""

    model_config = ConfigDict(frozen=True)


class Distribution(StrictModel):
    """Percentiles by nearest rank."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Environment(StrictModel):
    """What ran where."""

    versions: dict[str, str]
    command: list[str]
    started_at: str
    host: dict[str, str | int]
    server: dict[str, str] = Field(description="What the target said of itself.")


class Requests(StrictModel):
    """Counts. offered = succeeded + failed + dropped + interrupted."""

    offered: int
    succeeded: int
    failed: int
    dropped: int = Field(description="Due, but never sent: the client's own limit of requests in flight was reached.")
    interrupted: int = Field(description="In flight when the run was ended by hand; neither good nor bad.")
    late: int = Field(description="Sent more than 10 ms after they were due.")
    errors: dict[str, int]
    error_examples: dict[str, str]


class Throughput(StrictModel):
    """Rates over some stretch of the run. Tokens are spread evenly over each request's decode time."""

    start: float
    end: float
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float


class Tokens(StrictModel):
    """As the server's `usage` counts them."""

    prompt: int
    completion: int
    cached: int | None
    asked_per_prompt: int
    counted_per_prompt: float | None
    without_usage: int = Field(description="Successful answers that held no usage.")
    short_outputs: int = Field(description="Successful answers with fewer tokens than asked for.")


class Latency(StrictModel):
    """Successful requests only; how many there are not is in `requests`."""

    ttft_from_intended: Distribution | None
    ttft: Distribution | None = Field(description="From the actual send.")
    e2e_from_intended: Distribution | None
    e2e: Distribution | None = Field(description="From the actual send.")
    tpot: Distribution | None = Field(description="(E2E - TTFT) / (n - 1) a request, n from usage.")
    itl: Distribution | None = Field(description="Between tokens; None where they came packed.")
    gateway_queue: Distribution | None = Field(description="x-gateway-queue-ms.")


class AudioFigures(StrictModel):
    """Uploaded audio of successful requests, where its length is known."""

    seconds: float
    seconds_per_second: float = Field(description="Real-time factor: ended in the same stretch as requests/s.")
    request_seconds_per_second: float = Field(description="Of one request: its audio by its latency, median.")


class PartFigures(StrictModel):
    """One part of a mix."""

    name: str
    requests: Requests
    latency: Latency


class Streaming(StrictModel):
    """How tokens were packed. Above 1 token an event or 1 event a read, times between reads are not between tokens."""

    tokens_per_event: float
    events_per_read: float
    whole_ratio: float = Field(default=0.0, description="Share of answers of several tokens that came in one read.")


class Stall(StrictModel):
    """A stretch without data for any of the requests in flight."""

    start: float
    seconds: float
    in_flight: int


class Concurrency(StrictModel):
    """Requests in flight as the client saw them, by event sweep."""

    peak: int
    mean: float


class BackendShare(StrictModel):
    """What one backend did."""

    name: str
    requests: int
    share: float
    succeeded: int
    prompt_tokens: int
    predicted_tokens: int | None
    cached_tokens: int | None
    hit_ratio: float | None = Field(description="cached / prompt tokens, where the backend reported the cached tokens.")
    predicted_ratio: float | None
    peak_in_flight: int = Field(description="Leaves out the time the gateway reports as queueing.")
    ttft_p50: float | None


class Routing(StrictModel):
    """Where requests went and what the prefix caches saved."""

    backends: list[BackendShare]
    hit_ratio: float | None
    ideal_hit_ratio: float | None = Field(description="If each group's prefix were computed exactly once.")
    affinity: float | None = Field(description="Share of requests that went to their group's most used backend.")


class Slo(StrictModel):
    """Attainment: requests within every bound, over all that were offered, refused and dropped ones included."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None = None
    gpu_percent: float | None = Field(default=None, description="The least mean utilisation of the GPUs.")
    gpu_measured_percent: float | None = None
    wanted: float
    met: int
    offered: int
    attainment: float
    goodput_per_second: float = Field(description="Over the same stretch of the run as requests/s.")
    passed: bool
    attainments: dict[str, float] = Field(default_factory=dict, description="Of each bound by itself.")


class WorkerLoad(StrictModel):
    """How one client process coped."""

    worker: int
    loop_lag_p50: float | None
    loop_lag_p99: float | None
    loop_lag_max: float | None
    cpu_share: float | None = Field(description="Mean share of one core.")
    cpu_share_p90: float | None


class ClientLoad(StrictModel):
    """Whether the client itself was the limit."""

    workers: list[WorkerLoad]
    send_lag: Distribution | None = Field(description="Actual send after the intended one.")
    lag_limit: float = Field(description="Above this p99 lag the run is invalid.")
    lost: list[str] = Field(default_factory=list, description="Why workers ended before their time.")


class GpuSeries(StrictModel):
    """One GPU of the client's machine, or of an exporter's page. None: not reported."""

    name: str
    driver: str
    memory_total_mib: float | None
    at: list[float] = Field(default_factory=list)
    utilization_percent: list[float | None] = Field(default_factory=list)
    memory_used_mib: list[float | None] = Field(default_factory=list)
    power_watts: list[float | None] = Field(default_factory=list)


class BackendGauges(StrictModel):
    """A gateway's reports of one backend, at the moments of its page."""

    in_flight: list[float | None] = Field(default_factory=list)
    limit: list[float | None] = Field(default_factory=list, description="Sequences that it may have.")


class PageSeries(StrictModel):
    """One Prometheus page, read once a second. A None was not on the page; totals count from the server's start."""

    name: str
    url: str
    failures: int = Field(default=0, description="Times it could not be read.")
    at: list[float] = Field(default_factory=list)
    running: list[float | None] = Field(default_factory=list)
    waiting: list[float | None] = Field(default_factory=list)
    kv_cache_usage: list[float | None] = Field(default_factory=list)
    preemptions: list[float | None] = Field(default_factory=list, description="Total.")
    prefix_queries: list[float | None] = Field(default_factory=list, description="Total of tokens.")
    prefix_hits: list[float | None] = Field(default_factory=list, description="Total of tokens.")
    backends: dict[str, BackendGauges] = Field(default_factory=dict, description="A gateway's, by name.")


class Samples(StrictModel):
    """Samples taken during the load."""

    gpus: list[GpuSeries]
    no_gpu: str | None = Field(description="Why no GPU was seen, or no longer.")
    pages: list[PageSeries]


class Check(StrictModel):
    """One thing that a run must be: `message` says why it is not. None: unknown, as the run is invalid."""

    name: str
    passed: bool | None
    message: str = ""


class Verdict(StrictModel):
    """Invalid: the figures are the client's, not the server's. Not passed: invalid, too many errors, or SLO missed."""

    valid: bool
    passed: bool
    reasons: list[str]
    warnings: list[str]
    ended_early: bool
    overloaded: bool = Field(default=False, description="Open loop: requests piled up, the rate is above capacity.")
    checks: list[Check] = Field(default_factory=list)


class Bucket(StrictModel):
    """One stretch of the timeline; requests belong to the bucket in which they end, latencies where they were due."""

    start: float
    in_flight: int
    succeeded: int
    failed: int
    output_tokens_per_second: float
    ttft_p50: float | None
    ttft_p95: float | None
    e2e_p50: float | None
    e2e_p95: float | None
    ttft_p99: float | None = None
    e2e_p99: float | None = None
    tpot_p50: float | None = None
    tpot_p95: float | None = None
    tpot_p99: float | None = None


class Figures(StrictModel):
    """Everything measured in one run."""

    schema_version: int = SCHEMA_VERSION
    definitions: dict[str, int] = Field(
        default_factory=dict, description="Versions; what is not there is of the first."
    )
    environment: Environment
    plan: dict[str, Any]
    requests: Requests
    overall: Throughput
    steady: Throughput | None = Field(description="Without the ramp and the tail; None where the run had no such part.")
    tokens: Tokens
    latency: Latency
    streaming: Streaming | None
    stalls: list[Stall] = Field(default_factory=list)
    concurrency: Concurrency
    routing: Routing
    slo: Slo | None
    intervals: dict[str, Interval] = Field(
        default_factory=dict, description="95 % confidence by figure of a series; without those too short a run for."
    )
    client: ClientLoad
    parts: list[PartFigures] = Field(default_factory=list, description="By part of a mix; empty without one.")
    audio: AudioFigures | None = None
    metrics_delta: dict[str, float] = Field(description="Change of the target's Prometheus counters over the run.")
    timeline: list[Bucket]
    samples: Samples | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_cross_check(cls, document: Any) -> Any:
        """Older files hold the figures of a second client, or null in their place."""
        if isinstance(document, dict):
            return {name: value for name, value in document.items() if name != "cross_check"}
        return document


class Results(Figures):
    """One run: the figures and their assessment."""

    verdict: Verdict


class Bounds(BaseModel):
    """The conditions for a run to pass."""

    model_config = ConfigDict(frozen=True)

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    gpu_percent: float | None = None
    attainment: float = 0.95
    max_error_ratio: float = 0.0

    def are_none(self) -> bool:
        """Whether nothing is bounded but errors."""
        return all(bound is None for bound in (self.ttft_ms, self.tpot_ms, self.e2e_ms, self.gpu_percent))

    def one_by_one(self) -> Iterator[tuple[str, Bounds]]:
        """Each latency's bound, and bounds that hold nothing else."""
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            if getattr(self, name) is not None:
                yield name, Bounds(**{name: getattr(self, name)})


# By path in results.json; a path covers everything below it. A figure whose definition changes gets a new version here.
DEFINITIONS = {
    "requests": 1,
    "overall": 1,
    "steady": 1,
    "tokens": 1,
    "latency": 1,
    "streaming": 1,
    "stalls": 1,
    "concurrency": 1,
    "routing": 1,
    "parts": 1,
    "audio": 1,
    "client": 1,
    "timeline": 1,
    "intervals": 1,
    # 2: an answer of several tokens without a measured TPOT misses a bound on TPOT; 1: it kept the bound.
    "slo": 2,
    # 2: as above, and over the same stretch of the run as requests/s; 1: over the whole run.
    "slo.goodput_per_second": 2,
    # 2: half of ITL p50 bounds the client's lag too; one stall is not a rate above capacity.
    "verdict": 2,
}
_FIRST = 1


def redefined(path: str, before: Mapping[str, int], after: Mapping[str, int] = DEFINITIONS) -> tuple[int, int] | None:
    """Both versions of the figure at a path of results.json; None where they are the same.

    A file without any versions has the first ones.
    """
    place = path.partition("[")[0]
    one, other = _version(place, before), _version(place, after)
    return None if one == other else (one, other)


def _version(path: str, versions: Mapping[str, int]) -> int:
    """Of the nearest path at or above it that has one."""
    while path:
        if path in versions:
            return versions[path]
        path = path.rpartition(".")[0]
    return _FIRST
