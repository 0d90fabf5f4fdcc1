"""Metrics. Counting is plain arithmetic on the hot path; prometheus-client renders it when it is scraped."""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, cast

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, Sample

from gateway.core.observe.record import Record

_LONG = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    20.48, 40.96, 81.92, 163.84, 327.68, 655.36, 1310.72,
)  # fmt: skip
_SHORT = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 30.0, 60.0, 100.0,
)  # fmt: skip
_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_MAX_MODELS = 1000

Labels = tuple[str, ...]
Read = Callable[[], Iterable[tuple[Labels, Any]]]
Breathe = Callable[[], None]


class Live:
    """A metric whose values are read when it is scraped: `read` gives label values and value."""

    def __init__(self, kind: type[Metric], name: str, documentation: str, *, labels: Labels, read: Read) -> None:
        self.name, self.documentation, self.labels, self.read = name, documentation, labels, read
        self._kind: Any = kind

    def family(self, values: Iterable[tuple[Labels, Any]] | None = None, breathe: Breathe = lambda: None) -> Metric:
        """With these values, which were read earlier, or the current ones."""
        family: Metric = self._kind(self.name, self.documentation, labels=self.labels)
        for labels, value in self.read() if values is None else values:
            self._add_to(family, labels, value)
            breathe()
        return family

    def _add_to(self, family: Any, labels: Labels, value: Any) -> None:
        family.add_metric(labels, value)


class _Sum:
    """Of one value of the labels: found once, it is changed in place."""

    __slots__ = ("amount",)

    def __init__(self) -> None:
        self.amount = 0.0


class Counter(Live):
    """Sums by label values."""

    def __init__(self, name: str, documentation: str, labels: Labels) -> None:
        self._sums: dict[Labels, _Sum] = {}
        super().__init__(CounterMetricFamily, name, documentation, labels=labels, read=lambda: self.values.items())

    @property
    def values(self) -> dict[Labels, float]:
        return {labels: each.amount for labels, each in self._sums.items()}

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        known = self._sums.get(labels)
        if known is None:
            known = self._sums[labels] = _Sum()
        known.amount += amount

    def forget(self, label: str, value: str) -> None:
        """Drop the sums that have this value of a label."""
        place = self.labels.index(label)
        self._sums = {labels: each for labels, each in self._sums.items() if labels[place] != value}


class Histogram(Live):
    """Counts by label values and upper bounds, and sums by label values."""

    def __init__(self, name: str, documentation: str, labels: Labels, *, bounds: tuple[float, ...]) -> None:
        self.values: dict[Labels, tuple[list[int], list[float]]] = {}
        self._bounds = bounds
        super().__init__(HistogramMetricFamily, name, documentation, labels=labels, read=self._copied)

    def observe(self, labels: Labels, *values: float) -> None:
        known = self.values.get(labels)
        if known is None:
            known = self.values[labels] = ([0] * (len(self._bounds) + 1), [0.0])
        (counts, total), bounds = known, self._bounds
        most, amount = len(bounds), 0.0
        for value in values:
            place = 0
            while place < most and bounds[place] < value:  # most values are low
                place += 1
            counts[place] += 1
            amount += value
        total[0] += amount

    def _copied(self) -> Iterator[tuple[Labels, Any]]:
        for labels, (counts, total) in self.values.items():
            yield labels, ([*counts], total[0])

    def _add_to(self, family: Any, labels: Labels, value: Any) -> None:
        bounds, (counts, total) = [*map(str, self._bounds), "+Inf"], value
        family.add_metric(labels, buckets=[*zip(bounds, accumulate(map(float, counts)), strict=True)], sum_value=total)


class ProcessMetrics(Live):
    """The system's figures of this process, read from /proc when the metrics are rendered."""

    def __init__(self) -> None:
        super().__init__(Metric, "process", "The process of the gateway.", labels=(), read=lambda: ())
        self._collector = ProcessCollector(registry=None)

    def families(self) -> Iterable[Metric]:
        return self._collector.collect()


class MetricsSnapshot:
    """Metrics as they were at one moment; they are made ready and rendered in any thread, with pauses for others."""

    def __init__(self, live: Iterable[Live], breathe: Breathe) -> None:
        self._taken = [(each, [*each.read()]) for each in live]
        self._breathe = breathe

    def collect(self) -> Iterable[Metric]:
        for live, values in self._taken:
            if isinstance(live, ProcessMetrics):
                yield from live.families()
                continue
            metric = live.family(values, self._breathe)
            metric.samples = cast(Any, self._pausing(metric.samples))  # encoders go through them once
            yield metric

    def _pausing(self, samples: list[Sample]) -> Iterator[Sample]:
        for sample in samples:
            yield sample
            self._breathe()


class Metrics:
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
            bounds=_LONG,
        )
        self.first_byte = Histogram(
            "gateway_time_to_first_token_seconds",
            "Time from the end of a request to the first token of a stream.",
            model,
            bounds=_SHORT,
        )
        self.per_token = Histogram(
            "gateway_time_per_output_token_seconds",
            "Mean time between the tokens of a stream after its first one; without streams whose client was slow.",
            model,
            bounds=_TOKEN,
        )
        self.queue_wait = Histogram(
            "gateway_queue_wait_seconds", "Time in the queue.", ("model", "class"), bounds=_SHORT
        )
        self.hit_tokens = Counter(
            "gateway_prefix_hit_tokens_total",
            "Prompt tokens found in the KV cache, as predicted by the gateway and as reported by the backend.",
            ("backend", "kind"),
        )
        self.prompt_tokens = Counter(
            "gateway_prompt_tokens_total", "Prompt tokens, as backends report them; else estimated.", model
        )
        self.completion_tokens = Counter(
            "gateway_completion_tokens_total", "Output tokens, as backends report them; else estimated.", model
        )
        self.attempts = Counter(
            "gateway_upstream_attempts_total",
            "Attempts to send a request to a backend, including retries, by result.",
            ("backend", "result"),
        )
        self.fallbacks = Counter(
            "gateway_model_fallbacks_total",
            "Requests sent to a fallback of their model, by reason.",
            ("model", "fallback", "reason"),
        )
        self.limit_moves = Counter(
            "gateway_limit_moves_total",
            "Changes of the adaptive concurrency limit of a backend, by reason.",
            ("backend", "reason"),
        )
        self.loop_lag = Histogram(
            "gateway_event_loop_lag_seconds", "Delay of a periodic timer on the event loop.", (), bounds=LAG_BOUNDS
        )
        self._live: list[Live] = [self.requests, self.duration, self.first_byte, self.per_token, self.queue_wait]
        self._live += [self.hit_tokens, self.prompt_tokens, self.completion_tokens, self.attempts]
        self._live += [self.fallbacks, self.limit_moves]
        self._live.append(self.loop_lag)
        self._models: set[str] = set()
        self.before_collecting: Callable[[], None] = lambda: None

    def gauge(self, name: str, documentation: str, labels: Labels, read: Read) -> None:
        self._live.append(Live(GaugeMetricFamily, name, documentation, labels=labels, read=read))

    def counter(self, name: str, documentation: str, labels: Labels, read: Read) -> None:
        self._live.append(Live(CounterMetricFamily, name, documentation, labels=labels, read=read))

    def include(self, *live: Live) -> None:
        self._live += live

    def forget_backend(self, name: str) -> None:
        """A backend has left for good: names of pods are without end."""
        for counter in (self.requests, self.hit_tokens, self.attempts, self.limit_moves):
            counter.forget("backend", name)

    def __iter__(self) -> Iterator[Live]:
        return iter(self._live)

    def collect(self) -> Iterable[Metric]:
        return self.snapshot(lambda: None).collect()

    def snapshot(self, breathe: Breathe) -> MetricsSnapshot:
        """The current values. To be called on the event loop, unlike `collect` of the snapshot."""
        self.before_collecting()
        return MetricsSnapshot(self._live, breathe)

    def finished(self, records: list[Record]) -> None:
        """Count requests, all that have the same labels together: each label is looked up once."""
        alike: dict[tuple[str, str, str, str, bool], list[Record]] = {}
        for record in records:
            labels = record.endpoint, record.model, record.backend, record.outcome, record.batch
            group = alike.get(labels)
            if group is None:
                group = alike[labels] = []
            group.append(record)
        for (endpoint, model, backend, outcome, batch), group in alike.items():
            if model not in self._models and len(self._models) >= _MAX_MODELS:
                model = "other"
            self._models.add(model)
            self.requests.add((endpoint, model, backend, outcome), len(group))
            if model:
                waits = [record.queue_seconds for record in group]
                self.queue_wait.observe((model, "batch" if batch else "interactive"), *waits)
            if backend:
                self._answered(endpoint, model, backend, group)

    def _answered(self, endpoint: str, model: str, backend: str, group: list[Record]) -> None:
        durations: list[float] = []
        first_bytes: list[float] = []
        per_token: list[float] = []
        predicted = prompt = completion = 0
        actual: int | None = None
        for record in group:
            durations.append(record.ended_seconds - record.arrived_seconds)
            if record.streams and record.first_byte_seconds is not None:
                first_bytes.append(record.first_byte_seconds - record.arrived_seconds)
                demand, rest = record.demand, record.completion_tokens - 1
                if rest > 0 and demand is not None and demand.sequences == 1 and not record.client_was_slow:
                    per_token.append((record.ended_seconds - record.first_byte_seconds) / rest)
            predicted += record.predicted_hit_tokens
            if record.actual_hit_tokens is not None:
                actual = (actual or 0) + record.actual_hit_tokens
            prompt += record.prompt_tokens
            completion += record.completion_tokens
        self._tokens(model, prompt, completion)
        self.duration.observe((endpoint, model), *durations)
        if first_bytes:
            self.first_byte.observe((model,), *first_bytes)
        if per_token:
            self.per_token.observe((model,), *per_token)
        self.hit_tokens.add((backend, "predicted"), predicted)
        if actual is not None:
            self.hit_tokens.add((backend, "actual"), actual)

    def counted(self, record: Record) -> None:
        """Count the tokens of a response that went on after its answer, which was counted as a request."""
        model = record.model if record.model in self._models else "other"
        self._tokens(model, record.prompt_tokens, record.completion_tokens)

    def _tokens(self, model: str, prompt: int, completion: int) -> None:
        if prompt or completion:
            self.prompt_tokens.add((model,), prompt)
            self.completion_tokens.add((model,), completion)
