"""What a run found, as it is kept in results.json. Latencies are milliseconds from the time a request was due."""

from pydantic import BaseModel, ConfigDict

from loadtest.report.schema import Distribution
from tests.bench.results import Machine


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Fidelity(_Record):
    """Predicted against actual cached tokens, as shares of the prompts' tokens."""

    requests: int
    error: float
    """|predicted - actual|, summed, over the prompts' tokens."""
    over: float
    under: float
    error_a_request: float
    """The mean of each request's own share."""


class Recovery(_Record):
    """Fidelity on the engines that lost their caches."""

    before: Fidelity | None
    after: dict[str, Fidelity | None]
    """By the ordinal of the requests there since."""


class Figures(_Record):
    """One arm, once."""

    requests: int
    failed: dict[str, int]
    first_error: str
    seconds: float
    """From the first request to the last answer."""
    hit_ratio: float
    """Of the engines' own counters: prompt tokens found in a prefix cache, of all that were looked up."""
    prompt_tokens: float
    preemptions: float
    least_share: float
    """Requests at the engine with the fewest, over its even share."""
    output_tokens_per_second: float
    ttft: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    wrong_lengths: int
    """Answers whose tokens are not as many as were asked for."""
    late_ms: float
    """The 99th percentile of how late the client sent."""
    router_cpu_ms: float
    """CPU of the router's processes for a request."""
    others_share: float
    """Of the machine's processors, what others used meanwhile; 0 where engines restart, whose time is lost."""
    fidelity: Fidelity | None = None
    recovery: Recovery | None = None


class Turn(_Record):
    """One arm in one repetition."""

    repetition: int
    figures: Figures | None = None
    ttft_ms: tuple[float, ...] = ()
    e2e_ms: tuple[float, ...] = ()
    failure: str = ""


class Setup(_Record):
    """What was run."""

    engines: str
    model: str
    kv_tokens: int
    block_tokens: int
    max_num_seqs: int
    kv_events: bool
    trace: str
    rows: int
    prompt_tokens: int
    output_tokens: int
    ideal_hit_ratio: float
    """One engine with an endless cache."""
    requests_per_second: float
    capacity: float | None
    """Requests per second of the engines when always busy and placed by chance; None where the rate was given."""
    endpoint: str
    fault: str


class RoutingResults(_Record):
    """A whole run; turns by arm, one for each repetition."""

    machine: Machine
    versions: dict[str, str]
    labels: dict[str, str]
    setup: Setup
    turns: dict[str, list[Turn]]
