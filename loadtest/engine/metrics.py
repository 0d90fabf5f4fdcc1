"""The /metrics page: vLLM's names, labels and buckets, with the values of the simulated engine."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from loadtest.engine.cache_config_labels import cache_config_labels
from loadtest.engine.engine_stats import Histogram
from loadtest.engine.metric_texts import TEXTS

if TYPE_CHECKING:
    from loadtest.engine.service import Service


def render(service: "Service") -> bytes:
    """The page, now."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_EngineCollector(service))
    return generate_latest(registry)


class _EngineCollector(Collector):
    """Reads the engine at the moment of the scrape."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self._labels = {"engine": "0", "model_name": service.served_model}

    def collect(self) -> Iterable[Metric]:
        """All families, in vLLM's order."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        labels = cache_config_labels(self._service.config)
        yield self._gauge("vllm:cache_config_info", [(labels, 1.0)], with_labels=False)
        yield self._http_requests()

    def _gauges(self) -> Iterator[Metric]:
        scheduler = self._service.engine.scheduler
        yield self._gauge("vllm:num_requests_running", [({}, scheduler.num_running)])
        yield self._gauge("vllm:num_requests_waiting", [({}, scheduler.num_waiting)])
        yield self._gauge(
            "vllm:num_requests_waiting_by_reason",
            [({"reason": "capacity"}, scheduler.num_waiting), ({"reason": "deferred"}, 0.0)],
        )
        states = [("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)]
        yield self._gauge("vllm:engine_sleep_state", [({"sleep_state": name}, value) for name, value in states])
        yield self._gauge("vllm:kv_cache_usage_perc", [({}, scheduler.pool.num_used / scheduler.pool.num_blocks)])

    def _counters(self) -> Iterator[Metric]:
        counters, stats = self._service.engine.scheduler.counters, self._service.engine.stats
        computed = counters.prompt_tokens - counters.prompt_tokens_cached
        yield self._counter("vllm:prefix_cache_queries", [({}, counters.prefix_queries_tokens)])
        yield self._counter("vllm:prefix_cache_hits", [({}, counters.prefix_hits_tokens)])
        yield self._counter("vllm:external_prefix_cache_queries", [({}, 0)])
        yield self._counter("vllm:external_prefix_cache_hits", [({}, 0)])
        yield self._counter("vllm:mm_cache_queries", [({}, 0)])
        yield self._counter("vllm:mm_cache_hits", [({}, 0)])
        yield self._counter("vllm:num_preemptions", [({}, counters.preemptions)])
        yield self._counter("vllm:prompt_tokens", [({}, counters.prompt_tokens)])
        sources = [("local_compute", computed), ("local_cache_hit", counters.prompt_tokens_cached)]
        sources.append(("external_kv_transfer", 0))
        yield self._counter("vllm:prompt_tokens_by_source", [({"source": name}, value) for name, value in sources])
        yield self._counter("vllm:prompt_tokens_cached", [({}, counters.prompt_tokens_cached)])
        tiers = [("device", counters.prompt_tokens_cached)]
        tiers += [(tier, 0) for tier in ("host", "p2p", "disk", "external_unspecified")]
        yield self._counter("vllm:prompt_tokens_cached_by_source", [({"source": name}, value) for name, value in tiers])
        yield self._counter("vllm:generation_tokens", [({}, counters.generation_tokens)])
        yield self._counter(
            "vllm:request_success", [({"finished_reason": reason}, count) for reason, count in stats.finished.items()]
        )
        model = {"model_name": self._service.served_model}
        yield self._counter(
            "vllm:admission_rejections",
            [
                ({**model, "reason": "max_num_queued_reqs"}, stats.rejected),
                ({**model, "reason": "max_num_queued_tokens"}, 0),
            ],
            with_labels=False,
        )

    def _histograms(self) -> Iterator[Metric]:
        stats = self._service.engine.stats
        yield self._histogram("vllm:request_prompt_tokens", stats.prompt_tokens)
        yield self._histogram("vllm:request_generation_tokens", stats.generation_tokens)
        yield self._histogram("vllm:iteration_tokens_total", stats.iteration_tokens)
        yield self._histogram("vllm:request_max_num_generation_tokens", stats.generation_tokens)
        yield self._histogram("vllm:request_params_n", stats.n)
        yield self._histogram("vllm:request_params_max_tokens", stats.max_tokens)
        yield self._histogram("vllm:time_to_first_token_seconds", stats.time_to_first_token)
        yield self._histogram("vllm:inter_token_latency_seconds", stats.inter_token_latency)
        yield self._histogram("vllm:request_time_per_output_token_seconds", stats.time_per_output_token)
        yield self._histogram("vllm:e2e_request_latency_seconds", stats.e2e_latency)
        yield self._histogram("vllm:request_queue_time_seconds", stats.queue_time)
        yield self._histogram("vllm:request_inference_time_seconds", stats.inference_time)
        yield self._histogram("vllm:request_prefill_time_seconds", stats.prefill_time)
        yield self._histogram("vllm:request_decode_time_seconds", stats.decode_time)
        yield self._histogram("vllm:request_num_preemptions", stats.preemptions)
        yield self._histogram("vllm:request_prefill_kv_computed_tokens", stats.prefill_computed_tokens)

    def _http_requests(self) -> Metric:
        family = CounterMetricFamily(
            "http_requests",
            "Total number of requests by method, status and handler.",
            labels=["handler", "method", "status"],
        )
        for key, count in self._service.http_requests.items():
            family.add_metric(list(key), count)
        return family

    def _merged(self, labels: dict[str, str], with_labels: bool) -> dict[str, str]:
        return dict(sorted({**self._labels, **labels}.items())) if with_labels else labels

    def _gauge(self, name: str, samples: list[tuple[dict[str, str], float]], with_labels: bool = True) -> Metric:
        merged = [(self._merged(labels, with_labels), value) for labels, value in samples]
        family = GaugeMetricFamily(name, TEXTS[name], labels=list(merged[0][0]))
        for labels, value in merged:
            family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, samples: list[tuple[dict[str, str], float]], with_labels: bool = True) -> Metric:
        merged = [(self._merged(labels, with_labels), value) for labels, value in samples]
        family = CounterMetricFamily(name, TEXTS[name], labels=list(merged[0][0]))
        for labels, value in merged:
            family.add_metric(list(labels.values()), value, created=self._service.started_unix_seconds)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        family: Any = HistogramMetricFamily(name, TEXTS[name], labels=list(self._labels))
        total, buckets = 0, []
        for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        metric: Metric = family
        metric.add_sample(f"{name}_created", self._labels, self._service.started_unix_seconds)
        return metric
