"""Metrics. Counting is plain arithmetic on the hot path; prometheus-client renders it when it is scraped."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, Sample
from prometheus_client.registry import Collector

from gateway.observe.record import Record

_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.48, 40.96, 81.92, 163.84, 327.68)
_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_MAX_MODELS = 1000

Labels = tuple[str, ...]
Breathe = Callable[[], None]
Frozen = Callable[[Breathe], Metric]


class Live:
    """A metric that is counted here, or read when it is looked at."""

    name: str
    documentation: str
    labels: Labels

    def frozen(self) -> Frozen:
        """The values as they are now, to be made a family of anywhere."""
        raise NotImplementedError

    def family(self) -> Metric:
        return self.frozen()(lambda: None)


class Counter(Live):
    """Sums by label values."""

    def __init__(self, name: str, documentation: str, labels: Labels) -> None:
        self.name, self.documentation, self.labels = name, documentation, labels
        self.values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def frozen(self) -> Frozen:
        family = CounterMetricFamily(self.name, self.documentation, labels=self.labels)
        return partial(_filled, family, [*self.values.items()])


class Histogram(Live):
    """Counts by label values and upper bounds."""

    def __init__(self, name: str, documentation: str, labels: Labels, bounds: tuple[float, ...]) -> None:
        self.name, self.documentation, self.labels, self.bounds = name, documentation, labels, bounds
        self.values: dict[Labels, tuple[list[int], list[float]]] = {}

    def observe(self, labels: Labels, value: float) -> None:
        known = self.values.get(labels)
        if known is None:
            known = self.values[labels] = ([0] * (len(self.bounds) + 1), [0.0])
        known[0][bisect_left(self.bounds, value)] += 1
        known[1][0] += value

    def frozen(self) -> Frozen:
        return partial(self._family, [(labels, [*counts], total[0]) for labels, (counts, total) in self.values.items()])

    def _family(self, values: list[tuple[Labels, list[int], float]], breathe: Breathe) -> Metric:
        family = HistogramMetricFamily(self.name, self.documentation, labels=self.labels)
        for labels, counts, total in values:
            running, buckets = 0, []
            for bound, count in zip((*map(str, self.bounds), "+Inf"), counts, strict=True):
                running += count
                buckets.append((bound, float(running)))
            family.add_metric(labels, buckets=buckets, sum_value=total)
            breathe()
        return family


Read = Callable[[], Iterable[tuple[Labels, float]]]


class Scraped(Live):
    """Values that are read when scraped: `read` gives label values and value."""

    def __init__(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        documentation: str,
        labels: Labels,
        read: Read,
    ) -> None:
        self.name, self.documentation, self.labels = name, documentation, labels
        self._kind, self._read = kind, read

    def frozen(self) -> Frozen:
        return partial(_filled, self._kind(self.name, self.documentation, labels=self.labels), [*self._read()])


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, values: list[tuple[Labels, float]], breathe: Breathe
) -> Metric:
    for labels, value in values:
        family.add_metric(labels, value)
        breathe()
    return family


class FamilySamples(list[Sample]):
    """Samples of a family, with pauses while they are gone through."""

    def __init__(self, samples: Iterable[Sample], breathe: Breathe) -> None:
        super().__init__(samples)
        self._breathe = breathe

    def __iter__(self) -> Iterator[Sample]:
        for sample in super().__iter__():
            yield sample
            self._breathe()


class MetricsSnapshot(Collector):
    """Metrics as they were at one moment; they are made ready and rendered in any thread, with pauses for others."""

    def __init__(self, frozen: Sequence[Frozen], breathe: Breathe) -> None:
        self._frozen = frozen
        self._breathe = breathe

    def collect(self) -> Iterable[Metric]:
        for family in self._frozen:
            metric = family(self._breathe)
            metric.samples = FamilySamples(metric.samples, self._breathe)
            yield metric


class Metrics(Collector):
    """Every metric of the gateway. Labels that clients choose are capped."""

    def __init__(self) -> None:
        model = ("model",)
        self.requests = Counter(
            "gateway_requests_total", "Completed requests, by outcome.", ("endpoint", "model", "backend", "outcome")
        )
        self.duration = Histogram(
            "gateway_request_duration_seconds",
            "Time from the end of a request to the end of its response.",
            ("endpoint", "model"),
            _LONG,
        )
        self.first_byte = Histogram(
            "gateway_time_to_first_token_seconds",
            "Time from the end of a request to the first event of a stream.",
            model,
            _SHORT,
        )
        self.queue_wait = Histogram("gateway_queue_wait_seconds", "Time in the queue.", ("model", "class"), _SHORT)
        self.hit_tokens = Counter(
            "gateway_prefix_hit_tokens_total",
            "Prompt tokens found in the KV cache, as predicted by the gateway and as reported by the backend.",
            ("backend", "kind"),
        )
        self.prompt_tokens = Counter("gateway_prompt_tokens_total", "Prompt tokens reported by backends.", model)
        self.completion_tokens = Counter(
            "gateway_completion_tokens_total", "Output tokens reported by backends.", model
        )
        self.attempts = Counter(
            "gateway_upstream_attempts_total",
            "Attempts to send a request to a backend, including retries, by result.",
            ("backend", "result"),
        )
        self.limit_moves = Counter(
            "gateway_limit_moves_total",
            "Changes of the adaptive concurrency limit of a backend, by reason.",
            ("backend", "reason"),
        )
        self.loop_lag = Histogram(
            "gateway_event_loop_lag_seconds", "Delay of a periodic timer on the event loop.", (), _LAG
        )
        self._live: list[Live] = list(vars(self).values())  # all of the above
        self._models: set[str] = set()
        self.before_collecting: Callable[[], None] = lambda: None

    def gauge(self, name: str, documentation: str, labels: Labels, read: Read) -> None:
        self._live.append(Scraped(GaugeMetricFamily, name, documentation, labels, read))

    def counter(self, name: str, documentation: str, labels: Labels, read: Read) -> None:
        """Add a counter that is read when scraped; its name ends in `_total`."""
        self._live.append(Scraped(CounterMetricFamily, name, documentation, labels, read))

    def include(self, *live: Counter | Histogram) -> None:
        self._live += live

    def __iter__(self) -> Iterator[Live]:
        return iter(self._live)

    def collect(self) -> Iterable[Metric]:
        return self.snapshot(lambda: None).collect()

    def snapshot(self, breathe: Breathe) -> MetricsSnapshot:
        """Everything as it is now. To be called on the event loop, unlike what becomes of it."""
        self.before_collecting()
        return MetricsSnapshot([live.frozen() for live in self._live], breathe)

    def finished(self, record: Record) -> None:
        model = self._capped(record.model)
        self.requests.add((record.endpoint, model, record.backend, record.outcome))
        if record.model:
            self.queue_wait.observe((model, "batch" if record.batch else "interactive"), record.queue_seconds)
        if not record.backend:
            return
        self.duration.observe((record.endpoint, model), record.ended_seconds - record.arrived_seconds)
        if record.streams and record.first_byte_seconds is not None:
            self.first_byte.observe((model,), record.first_byte_seconds - record.arrived_seconds)
        self.hit_tokens.add((record.backend, "predicted"), record.predicted_hit_tokens)
        if record.actual_hit_tokens is not None:
            self.hit_tokens.add((record.backend, "actual"), record.actual_hit_tokens)
        if record.prompt_tokens:
            self.prompt_tokens.add((model,), record.prompt_tokens)
            self.completion_tokens.add((model,), record.completion_tokens)

    def _capped(self, model: str) -> str:
        if model in self._models:
            return model
        if len(self._models) >= _MAX_MODELS:
            return "other"
        self._models.add(model)
        return model


_ITEMS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_TOKENS = (16.0, 64.0, 256.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0)
_WAIT = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


class EmbeddingMetrics:
    """Counts batches. Only models that backends serve become labels."""

    def __init__(self, metrics: Metrics) -> None:
        model = ("model",)
        self.batch_items = Histogram("gateway_embedding_batch_items", "Inputs per embeddings batch.", model, _ITEMS)
        self.batch_tokens = Histogram(
            "gateway_embedding_batch_tokens", "Estimated tokens per embeddings batch.", model, _TOKENS
        )
        self.batch_wait = Histogram(
            "gateway_embedding_batch_wait_seconds",
            "Time that inputs waited for their batch to be sent.",
            model,
            _WAIT,
        )
        self.flushes = Counter(
            "gateway_embedding_flushes_total", "Embeddings batches sent, by reason.", ("model", "reason")
        )
        self.isolations = Counter(
            "gateway_embedding_isolations_total",
            "Rejected embeddings batches that were split in half to isolate the invalid input.",
            model,
        )
        self.splits = Counter(
            "gateway_embedding_splits_total", "Lists of inputs or documents split into pieces.", model
        )
        self.counted = Counter(
            "gateway_embedding_counted_total",
            "Shared batches for models with a tokenizer, by result of the token count per text.",
            ("model", "result"),
        )
        self.inputs = Counter(
            "gateway_embedding_inputs_total",
            "Inputs for models whose embeddings may be cached: computed or cached.",
            ("model", "source"),
        )
        self.evictions = Counter(
            "gateway_embedding_cache_evictions_total", "Cached embedding vectors evicted to free memory.", ()
        )
        metrics.include(*vars(self).values())


_EVERY_SECONDS = 0.1


async def watch_lag(histogram: Histogram) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _EVERY_SECONDS
        await asyncio.sleep(_EVERY_SECONDS)
        histogram.observe((), max(0.0, loop.time() - due))
