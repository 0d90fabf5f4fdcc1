"""Reads a backend's /metrics page: the few lines that matter, out of many. Pure.

The page of a busy server has thousands of lines. `LineFilter` keeps the wanted ones while the page comes in, so that
neither its size nor its parsing holds up the event loop.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gateway.backends.facts import Facts, Telemetry

MAX_LINE_BYTES = 65536
MAX_LINES = 1024  # the wanted lines of a hundred data-parallel ranks

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
KV_USAGE = "vllm:kv_cache_usage_perc"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"
GENERATION = "vllm:generation_tokens_total"
CACHE_CONFIG = "vllm:cache_config_info"
PROCESS_START = "process_start_time_seconds"

_LABELLED = (
    RUNNING,
    WAITING,
    WAITING_BY_REASON,
    KV_USAGE,
    PREFIX_QUERIES,
    PREFIX_HITS,
    PREEMPTIONS,
    GENERATION,
    CACHE_CONFIG,
)
_WANTED = (*(f"{name}{{".encode() for name in _LABELLED), f"{PROCESS_START} ".encode())


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics. Without `telemetry` the page is not one of vLLM."""

    telemetry: Telemetry | None = None
    engines: int = 1
    block_size_tokens: int | None = None
    kv_cache_tokens: int | None = None
    prefix_caching: bool | None = None
    process_start_seconds: float | None = None


class LineFilter:
    """Keeps the wanted lines of a page that comes in pieces, in bounded memory."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        """Take the next piece of the page."""
        *lines, rest = (self._rest + piece).split(b"\n")
        self._keep(lines)
        # A line that is too long is cut; its end does not start like a wanted line.
        self._rest = rest if len(rest) <= MAX_LINE_BYTES else b"#"

    def finish(self) -> str:
        """The wanted lines of the whole page."""
        self._keep([self._rest])
        self._rest = b""
        return b"\n".join(self._kept).decode("utf-8", "replace") + "\n"

    def _keep(self, lines: list[bytes]) -> None:
        if len(self._kept) < MAX_LINES:
            self._kept += [line for line in lines if line.startswith(_WANTED)][: MAX_LINES - len(self._kept)]


def read_scrape(text: str, at_seconds: float) -> Scrape:
    """Read filtered lines. Raises ValueError if it is not in the exposition format."""
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)

    def total(name: str) -> float:
        return sum(sample.value for sample in samples.get(name, ()))

    configs = [sample.labels for sample in samples.get(CACHE_CONFIG, ())]
    starts = [sample.value for sample in samples.get(PROCESS_START, ())]
    scrape = Scrape(
        engines=max(1, len({sample.labels.get("engine") for sample in samples.get(RUNNING, ())})),
        block_size_tokens=_integer(configs[0].get("block_size")) if configs else None,
        kv_cache_tokens=_sum_of_known(map(_kv_cache_tokens, configs)),
        prefix_caching=configs[0].get("enable_prefix_caching") == "True" if configs else None,
        process_start_seconds=starts[0] if starts else None,
    )
    if RUNNING not in samples:
        return scrape
    telemetry = Telemetry(
        at_seconds=at_seconds,
        running=int(total(RUNNING)),
        waiting=int(total(WAITING)),
        kv_usage=max((sample.value for sample in samples.get(KV_USAGE, ())), default=0.0),
        prefix_queries_tokens=total(PREFIX_QUERIES),
        prefix_hits_tokens=total(PREFIX_HITS),
        preemptions=total(PREEMPTIONS),
        generation_tokens=total(GENERATION) if GENERATION in samples else None,
        waiting_for_capacity=_waiting_for_capacity(samples.get(WAITING_BY_REASON, ())),
    )
    return replace(scrape, telemetry=telemetry)


def with_scrape(facts: Facts, scrape: Scrape) -> Facts:
    """The facts with those from /metrics."""
    return replace(
        facts,
        engines=scrape.engines,
        block_size_tokens=scrape.block_size_tokens,
        kv_cache_tokens=scrape.kv_cache_tokens,
        prefix_caching=scrape.prefix_caching,
        process_start_seconds=scrape.process_start_seconds,
    )


def _waiting_for_capacity(samples: Iterable[Sample]) -> int | None:
    """Requests that wait for the batch or the KV cache, not for an adapter or for blocks from elsewhere."""
    counts = [sample.value for sample in samples if sample.labels.get("reason") == "capacity"]
    return int(sum(counts)) if counts else None


def _kv_cache_tokens(config: dict[str, str]) -> int | None:
    if (tokens := _integer(config.get("kv_cache_size_tokens"))) is not None:
        return tokens
    # Older versions do not say. The product is too large for models that mix attention kinds.
    blocks, block_size = _integer(config.get("num_gpu_blocks")), _integer(config.get("block_size"))
    if blocks is None or block_size is None or blocks <= 1:  # encoders have no KV cache, only one unused block
        return None
    return blocks * block_size


def _integer(label: str | None) -> int | None:
    """Labels hold Python's text of a value: a number, or None."""
    return int(label) if label is not None and label.isascii() and label.isdigit() else None


def _sum_of_known(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number]
    return sum(known) if known else None
