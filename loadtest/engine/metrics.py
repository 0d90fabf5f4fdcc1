"""The /metrics page: vLLM's names, labels, help and buckets, with the values of the simulated engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from loadtest.engine.config import EngineConfig
from loadtest.engine.engine_loop import EngineLoop, EngineStats, Histogram

if TYPE_CHECKING:
    from loadtest.engine.service import Service


def cache_config_labels(config: EngineConfig, rank: int) -> dict[str, str]:
    """Labels with values for one data-parallel rank; those that the gateway reads are the simulated cache's."""
    limits = config.limits
    tokens = None if config.embedding else limits.num_blocks * limits.block_size  # encoders have no KV cache
    values: dict[str, object] = {
        "_block_size_resolved": True,
        "block_size": limits.block_size,
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": None,
        "effective_attention_block_size": limits.block_size,
        "enable_mamba_shared_prefix_checkpoint": False,
        "enable_prefix_caching": limits.prefix_caching and not config.embedding,
        "engine": rank,
        "gpu_memory_utilization": 0.92,
        "hash_block_size": None,
        "is_attention_free": False,
        "kv_cache_dtype_skip_layers": [],
        "kv_cache_layout": None,
        "kv_cache_max_concurrency": None if tokens is None else tokens / config.max_model_len,
        "kv_cache_memory_bytes": None,
        "kv_cache_size_tokens": tokens,
        "kv_offloading_backend": "native",
        "kv_offloading_size": None,
        "kv_sharing_fast_prefill": False,
        "mamba_block_size": None,
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": None,
        "mamba_ssm_cache_dtype": "auto",
        "num_cpu_blocks": None,
        "num_gpu_blocks": 1 if config.embedding else limits.num_blocks,
        "num_gpu_blocks_override": None,
        "prefix_cache_retention_interval": 0,
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": None,
        "replayssm_buffer_len": 16,
        "skip_page_size_padded": None,
        "sliding_window": None,
        "swa_bounded_replay": True,
        "use_kda_recoverssm": False,
        "use_replayssm": False,
        "user_specified_block_size": True,
    }
    return {name: str(value) for name, value in values.items()}


TEXTS: Final = MappingProxyType(
    {
        "vllm:num_requests_running": "Requests in the running batch.",
        "vllm:num_requests_waiting": "Requests in the queue.",
        "vllm:num_requests_waiting_by_reason": "Requests in the queue, by what they wait for.",
        "vllm:engine_sleep_state": "Whether the engine is awake, or which sleep level it is in.",
        "vllm:kv_cache_usage_perc": "Share of the KV cache in use; 1 is all of it.",
        "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
        "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
        "vllm:external_prefix_cache_queries": "Prompt tokens looked up in a shared cache.",
        "vllm:external_prefix_cache_hits": "Prompt tokens found in a shared cache.",
        "vllm:mm_cache_queries": "Multi-modal items looked up.",
        "vllm:mm_cache_hits": "Multi-modal items found.",
        "vllm:num_preemptions": "Preemptions.",
        "vllm:prompt_tokens": "Prefilled tokens.",
        "vllm:prompt_tokens_by_source": "Prompt tokens by where their KV came from.",
        "vllm:prompt_tokens_cached": "Prompt tokens found in a cache.",
        "vllm:prompt_tokens_cached_by_source": "Prompt tokens found in a cache, by cache tier.",
        "vllm:generation_tokens": "Generated tokens.",
        "vllm:request_success": "Ended requests, by reason.",
        "vllm:admission_rejections": "Requests refused by a queue limit, by reason.",
        "vllm:request_prompt_tokens": "Prompt tokens of a request.",
        "vllm:request_generation_tokens": "Generated tokens of a request.",
        "vllm:iteration_tokens_total": "Tokens of an engine step.",
        "vllm:request_max_num_generation_tokens": "Longest answer of a request.",
        "vllm:request_params_n": "The n that was asked for.",
        "vllm:request_params_max_tokens": "The max_tokens that was asked for.",
        "vllm:time_to_first_token_seconds": "From arrival to the first token.",
        "vllm:inter_token_latency_seconds": "From token to token.",
        "vllm:request_time_per_output_token_seconds": "Mean time a token of a request, the first excluded.",
        "vllm:e2e_request_latency_seconds": "From arrival to the last token.",
        "vllm:request_queue_time_seconds": "From arrival to the first scheduling.",
        "vllm:request_inference_time_seconds": "From the first scheduling to the last token.",
        "vllm:request_prefill_time_seconds": "From the first scheduling to the first token.",
        "vllm:request_decode_time_seconds": "From the first token to the last.",
        "vllm:request_num_preemptions": "Preemptions of a request.",
        "vllm:request_prefill_kv_computed_tokens": "Prompt tokens of a request not found in a cache.",
        "vllm:cache_config_info": "The cache configuration, in labels.",
        "sim_peak_requests": "Most running and waiting requests at once since the start.",
    }
)


Sample: TypeAlias = tuple[Mapping[str, str], float]


def render(service: "Service") -> bytes:
    registry = CollectorRegistry()
    registry.register(_ProcessCollector(service.started_unix_seconds))
    registry.register(_EngineCollector(service))
    return generate_latest(registry)


class _ProcessCollector(Collector):
    """The figures of this process, except for when it started: that is when the simulated one did."""

    def __init__(self, started_unix_seconds: float) -> None:
        self._started_unix_seconds = started_unix_seconds
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Metric]:
        for family in self._process.collect():
            if family.name == "process_start_time_seconds":
                yield GaugeMetricFamily(family.name, family.documentation, value=self._started_unix_seconds)
            else:
                yield family


class _EngineCollector(Collector):
    """Reads the engines at the moment of the scrape; each rank has its samples."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self._ranks = list(enumerate(service.engine.ranks))

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        config = self._service.config
        infos: list[Sample] = [(cache_config_labels(config, rank), 1.0) for rank, _ in self._ranks]
        yield _family(GaugeMetricFamily, "vllm:cache_config_info", infos)
        yield self._http_requests()

    def _gauges(self) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", lambda engine: [({}, engine.scheduler.num_running)])
        yield self._gauge("vllm:num_requests_waiting", lambda engine: [({}, engine.scheduler.num_waiting)])
        yield self._gauge(
            "vllm:num_requests_waiting_by_reason",
            lambda engine: [({"reason": "capacity"}, engine.scheduler.num_waiting), ({"reason": "deferred"}, 0.0)],
        )
        yield self._gauge("sim_peak_requests", lambda engine: [({}, engine.peak_requests)])
        asleep = float(self._service.is_asleep)
        states = [("awake", 1.0 - asleep), ("weights_offloaded", asleep), ("discard_all", 0.0)]
        yield self._gauge(
            "vllm:engine_sleep_state", lambda _engine: [({"sleep_state": name}, value) for name, value in states]
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            lambda engine: [({}, engine.scheduler.pool.num_used / engine.scheduler.pool.num_blocks)],
        )

    def _counters(self) -> Iterator[Metric]:
        def plain(name: str, value: Callable[[EngineLoop], float]) -> Metric:
            return self._counter(name, lambda engine: [({}, value(engine))])

        yield plain("vllm:prefix_cache_queries", lambda engine: engine.scheduler.counters.prefix_queries_tokens)
        yield plain("vllm:prefix_cache_hits", lambda engine: engine.scheduler.counters.prefix_hits_tokens)
        for absent in ("external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries"):
            yield plain(f"vllm:{absent}", lambda _engine: 0)
        yield plain("vllm:mm_cache_hits", lambda _engine: 0)
        yield plain("vllm:num_preemptions", lambda engine: engine.scheduler.counters.preemptions)
        yield plain("vllm:prompt_tokens", lambda engine: engine.scheduler.counters.prompt_tokens)
        yield self._counter("vllm:prompt_tokens_by_source", _prompt_tokens_by_source)
        yield plain("vllm:prompt_tokens_cached", lambda engine: engine.scheduler.counters.prompt_tokens_cached)
        yield self._counter("vllm:prompt_tokens_cached_by_source", _cached_tokens_by_source)
        yield plain("vllm:generation_tokens", lambda engine: engine.scheduler.counters.generation_tokens)
        yield self._counter(
            "vllm:request_success",
            lambda engine: [({"finished_reason": reason}, count) for reason, count in engine.stats.finished.items()],
        )
        yield self._rejections()

    def _histograms(self) -> Iterator[Metric]:
        def of(name: str, histogram: Callable[[EngineStats], Histogram]) -> Metric:
            return self._histogram(f"vllm:{name}", histogram)

        yield of("request_prompt_tokens", lambda stats: stats.prompt_tokens)
        yield of("request_generation_tokens", lambda stats: stats.generation_tokens)
        yield of("iteration_tokens_total", lambda stats: stats.iteration_tokens)
        yield of("request_max_num_generation_tokens", lambda stats: stats.generation_tokens)
        yield of("request_params_n", lambda stats: stats.n)
        yield of("request_params_max_tokens", lambda stats: stats.max_tokens)
        yield of("time_to_first_token_seconds", lambda stats: stats.time_to_first_token)
        yield of("inter_token_latency_seconds", lambda stats: stats.inter_token_latency)
        yield of("request_time_per_output_token_seconds", lambda stats: stats.time_per_output_token)
        yield of("e2e_request_latency_seconds", lambda stats: stats.e2e_latency)
        yield of("request_queue_time_seconds", lambda stats: stats.queue_time)
        yield of("request_inference_time_seconds", lambda stats: stats.inference_time)
        yield of("request_prefill_time_seconds", lambda stats: stats.prefill_time)
        yield of("request_decode_time_seconds", lambda stats: stats.decode_time)
        yield of("request_num_preemptions", lambda stats: stats.preemptions)
        yield of("request_prefill_kv_computed_tokens", lambda stats: stats.prefill_computed_tokens)

    def _rejections(self) -> Metric:
        """Of the server, not of an engine."""
        model, rejected = self._service.served_model, self._service.engine.rejected
        reasons = [("max_num_queued_reqs", rejected), ("max_num_queued_tokens", 0)]
        samples: list[Sample] = [({"model_name": model, "reason": reason}, count) for reason, count in reasons]
        created = self._service.started_unix_seconds
        return _family(CounterMetricFamily, "vllm:admission_rejections", samples, created=created)

    def _http_requests(self) -> Metric:
        family = CounterMetricFamily(
            "http_requests",
            "Total number of requests by method, status and handler.",
            labels=["handler", "method", "status"],
        )
        for key, count in self._service.http_requests.items():
            family.add_metric(list(key), count)
        return family

    def _labels(self, rank: int) -> dict[str, str]:
        return {"engine": str(rank), "model_name": self._service.served_model}

    def _samples(self, samples: Callable[[EngineLoop], list[Sample]]) -> list[Sample]:
        return [
            (dict(sorted({**self._labels(rank), **labels}.items())), value)
            for rank, engine in self._ranks
            for labels, value in samples(engine)
        ]

    def _gauge(self, name: str, samples: Callable[[EngineLoop], list[Sample]]) -> Metric:
        return _family(GaugeMetricFamily, name, self._samples(samples))

    def _counter(self, name: str, samples: Callable[[EngineLoop], list[Sample]]) -> Metric:
        created = self._service.started_unix_seconds
        return _family(CounterMetricFamily, name, self._samples(samples), created=created)

    def _histogram(self, name: str, histogram_of: Callable[[EngineStats], Histogram]) -> Metric:
        family: Any = HistogramMetricFamily(name, TEXTS[name], labels=["engine", "model_name"])
        for rank, engine in self._ranks:
            histogram = histogram_of(engine.stats)
            labels = self._labels(rank)
            total, buckets = 0, []
            for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
            family.add_metric(list(labels.values()), buckets, histogram.sum)
            family.add_sample(f"{name}_created", labels, self._service.started_unix_seconds)
        metric: Metric = family
        return metric


def _family(kind: Any, name: str, samples: list[Sample], **options: Any) -> Metric:
    """A family of samples that all have the same labels."""
    family = kind(name, TEXTS[name], labels=list(samples[0][0]))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value, **options)
    metric: Metric = family
    return metric


def _prompt_tokens_by_source(engine: EngineLoop) -> list[Sample]:
    counters = engine.scheduler.counters
    computed = counters.prompt_tokens - counters.prompt_tokens_cached
    sources = [("local_compute", computed), ("local_cache_hit", counters.prompt_tokens_cached)]
    return [({"source": name}, value) for name, value in [*sources, ("external_kv_transfer", 0)]]


def _cached_tokens_by_source(engine: EngineLoop) -> list[Sample]:
    tiers = [("device", engine.scheduler.counters.prompt_tokens_cached)]
    tiers += [(tier, 0) for tier in ("host", "p2p", "disk", "external_unspecified")]
    return [({"source": name}, value) for name, value in tiers]
