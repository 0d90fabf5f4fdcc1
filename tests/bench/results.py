"""What a run found, as it is kept in results.json."""

from pydantic import BaseModel, ConfigDict

from tests.bench.deciding.results import Timing
from tests.bench.embeddings.run import Sample as EmbeddingSample


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Percentiles(_Record):
    """Microseconds."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float


class Load(_Record):
    """What the load generator printed."""

    seconds: float
    requests: int
    events: int
    requests_per_s: float
    events_per_s: float
    connections: int
    in_flight: float
    cpu_share: float
    all_requests: int
    reconnects: int
    errors: dict[str, int]
    first_error: str
    latency_us: Percentiles
    refused: int
    """Answers with 429, where they are no errors."""
    refusal_us: Percentiles
    ttft_us: Percentiles
    ttft_added_us: Percentiles
    """TTFT less the time for which the engine held the request."""
    gap_us: Percentiles
    relay_us: Percentiles
    """From the engine's send to the client's read, of one event."""

    @property
    def error_count(self) -> int:
        return sum(self.errors.values())


class Sample(_Record):
    """One proxy under one load, once."""

    load: Load
    paced_events_per_s: float | None
    """What the engines aimed at; None without pacing."""
    proxy_cpu_seconds: float
    """Of the proxy's process tree, in the window in which the load was measured."""
    load_core_share: float
    """How busy the core of engines and load generator was; near 1 they were the limit."""
    others_share: float
    """How busy the proxy's core was with anything but the proxy."""
    affinity: float
    """Share of requests at the backend that has most of their group."""
    least_backend_share: float
    """Share of requests at the backend that has fewer; 0 = one backend only was used."""

    @property
    def cpu_us_per_request(self) -> float | None:
        """CPU of the proxy per request, in microseconds."""
        return self.proxy_cpu_seconds * 1e6 / self.load.requests if self.load.requests else None

    @property
    def cpu_us_per_event(self) -> float | None:
        """CPU of the proxy per streamed event, in microseconds."""
        return self.proxy_cpu_seconds * 1e6 / self.load.events if self.load.events else None


class Turn(_Record):
    """One proxy in one repetition: its samples by scenario."""

    samples: dict[str, Sample] = {}
    memory_mib: float | None = None
    """After all scenarios."""
    failure: str = ""
    """Why there are no further samples."""


class Machine(_Record):
    """Where the run took place."""

    cpu: str
    cores: int
    memory_gib: int
    kernel: str
    python: str
    """And how it was built."""
    quotable: bool
    """Whether figures of this Python may be quoted."""
    date: str


class Results(_Record):
    """A whole run; turns by proxy, one for each repetition."""

    machine: Machine
    versions: dict[str, str]
    scenarios: list[str]
    turns: dict[str, list[Turn]]
    line: list[Turn] = []
    """Of ours with caps in force, without and with requests that wait."""
    timings: list[Timing] = []
    """Of the gateway's decisions alone."""
    embeddings: list[EmbeddingSample] = []
    """Of the gateway's batches of embeddings."""
