from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.observe.metrics import Counter, Histogram, Metrics, ProcessMetrics
from gateway.core.observe.record import Record
from gateway.core.request import Demand


def record(**fields: object) -> Record:
    made = Record("id-1", "chat", 10.0)
    made.model, made.backend, made.outcome = "m", "a", "completed"
    made.status, made.attempts, made.ended_seconds = 200, 1, 12.0
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def scrape(metrics: Metrics) -> dict[str, float]:
    """Samples as `name{label="value",...}`."""
    registry = CollectorRegistry()
    registry.register(metrics)
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


def test_a_finished_request_is_counted_once_everywhere() -> None:
    metrics = Metrics()
    answered = record(
        streams=True, first_byte_seconds=10.3, queue_seconds=0.2, predicted_hit_tokens=64, actual_hit_tokens=48,
        prompt_tokens=100, completion_tokens=7,
    )  # fmt: skip
    metrics.finished([answered])
    samples = scrape(metrics)
    assert samples['gateway_requests_total{backend="a",endpoint="chat",model="m",outcome="completed"}'] == 1
    assert samples['gateway_request_duration_seconds_sum{endpoint="chat",model="m"}'] == 2.0
    assert samples['gateway_time_to_first_token_seconds_sum{model="m"}'] == pytest.approx(0.3)
    assert samples['gateway_queue_wait_seconds_count{class="interactive",model="m"}'] == 1
    assert samples['gateway_prefix_hit_tokens_total{backend="a",kind="predicted"}'] == 64
    assert samples['gateway_prefix_hit_tokens_total{backend="a",kind="actual"}'] == 48
    assert samples['gateway_prompt_tokens_total{model="m"}'] == 100
    assert samples['gateway_completion_tokens_total{model="m"}'] == 7


def test_a_request_that_reached_no_backend_is_counted_with_its_wait_alone() -> None:
    metrics = Metrics()
    metrics.finished([record(backend="", outcome="queue_timeout", queue_seconds=60.0, batch=True)])
    samples = scrape(metrics)
    assert samples['gateway_requests_total{backend="",endpoint="chat",model="m",outcome="queue_timeout"}'] == 1
    assert samples['gateway_queue_wait_seconds_sum{class="batch",model="m"}'] == 60.0
    assert {name.partition("{")[0] for name in samples} == {
        "gateway_requests_total", "gateway_queue_wait_seconds_bucket", "gateway_queue_wait_seconds_sum",
        "gateway_queue_wait_seconds_count",
    }  # fmt: skip


def test_a_request_refused_before_its_model_was_known_is_only_counted() -> None:
    metrics = Metrics()
    metrics.finished([record(backend="", model="", outcome="rejected")])
    assert list(scrape(metrics)) == ['gateway_requests_total{backend="",endpoint="chat",model="",outcome="rejected"}']


def test_an_answer_that_is_no_stream_has_no_time_to_first_token() -> None:
    metrics = Metrics()
    metrics.finished([record(first_byte_seconds=10.3)])
    assert not any(name.startswith("gateway_time_to_first_token") for name in scrape(metrics))


def streamed(**fields: object) -> Record:
    fields = {"demand": Demand("m", streams=True), "completion_tokens": 11, **fields}
    return record(streams=True, first_byte_seconds=10.5, **fields)


def test_the_time_per_output_token_is_the_mean_after_the_first_one() -> None:
    metrics = Metrics()
    metrics.finished([streamed(), streamed(completion_tokens=16)])
    samples = scrape(metrics)
    assert samples['gateway_time_per_output_token_seconds_count{model="m"}'] == 2
    assert samples['gateway_time_per_output_token_seconds_sum{model="m"}'] == pytest.approx(0.15 + 0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"completion_tokens": 1},
        {"completion_tokens": 0},
        {"client_was_slow": True},
        {"demand": Demand("m", streams=True, sequences=2)},
        {"demand": None},
    ],
    ids=["one token", "usage unknown", "slow client", "two answers", "implausible usage"],
)
def test_a_stream_whose_pace_is_not_known_has_no_time_per_output_token(fields: dict[str, object]) -> None:
    metrics = Metrics()
    metrics.finished([streamed(**fields)])
    assert not any(name.startswith("gateway_time_per_output_token") for name in scrape(metrics))


def test_times_to_the_first_token_are_told_apart_from_a_millisecond_to_100_seconds() -> None:
    metrics = Metrics()
    for seconds in (0.0009, 0.002, 0.9, 15.0, 99.0, 101.0):
        metrics.first_byte.observe(("m",), seconds)
    counts = [value for name, value in scrape(metrics).items() if "_bucket" in name]
    assert counts[0] == 1
    assert counts[-2:] == [5, 6]
    assert set(counts) == {1, 2, 3, 4, 5, 6}


def test_the_process_is_measured() -> None:
    metrics = Metrics()
    metrics.include(ProcessMetrics())
    samples = scrape(metrics)
    assert samples["process_open_fds{}"] > 3
    assert samples["process_resident_memory_bytes{}"] > 1e7
    assert {"process_cpu_seconds_total{}", "process_start_time_seconds{}", "process_max_fds{}"} <= set(samples)


def test_models_beyond_a_thousand_share_one_label() -> None:
    metrics = Metrics()
    for number in range(1003):
        metrics.finished([record(model=f"m{number}")])
    metrics.finished([record(model="m5")])
    by_model = {labels[1]: value for labels, value in metrics.requests.values.items()}
    assert len(by_model) == 1001
    assert by_model["other"] == 3
    assert by_model["m5"] == 2


def test_a_gauge_is_read_when_it_is_scraped() -> None:
    metrics, value = Metrics(), [1.0]
    metrics.gauge("gateway_backend_up", "Up.", ("backend",), lambda: [(("a",), value[0])])
    value[0] = 5.0
    assert scrape(metrics)['gateway_backend_up{backend="a"}'] == 5.0


def test_counters_add_up_by_labels() -> None:
    counter = Counter("gateway_x_total", "X.", ("a",))
    counter.add(("1",))
    counter.add(("1",), 2.5)
    counter.add(("2",))
    assert counter.values == {("1",): 3.5, ("2",): 1.0}


def test_a_histograms_buckets_are_cumulative_and_their_bounds_inclusive() -> None:
    metrics = Metrics()
    for value in (0.001, 0.0011, 99.0):
        metrics.loop_lag.observe((), value)
    samples = scrape(metrics)
    assert samples['gateway_event_loop_lag_seconds_bucket{le="0.001"}'] == 1
    assert samples['gateway_event_loop_lag_seconds_bucket{le="0.0025"}'] == 2
    assert samples['gateway_event_loop_lag_seconds_bucket{le="1.0"}'] == 2
    assert samples['gateway_event_loop_lag_seconds_bucket{le="+Inf"}'] == 3
    assert samples["gateway_event_loop_lag_seconds_sum{}"] == pytest.approx(99.0021)


def test_histograms_that_saw_nothing_show_nothing() -> None:
    assert Histogram("gateway_x_seconds", "X.", (), bounds=(1.0,)).family().samples == []


def test_label_values_cannot_break_the_format() -> None:
    metrics = Metrics()
    metrics.finished([record(model='m"\n# x')])
    assert scrape(metrics)


def test_every_name_ends_in_its_unit() -> None:
    for family in Metrics().collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name.startswith("gateway_")
        assert name.endswith(("_total", "_seconds", "_tokens", "_bytes", "_items")), name
        assert family.documentation.endswith(".")


def test_a_snapshot_has_the_values_of_its_time_and_pauses_on_the_way() -> None:
    metrics, breaths = Metrics(), list[None]()
    values = [1.0]
    metrics.gauge("gateway_x", "X.", (), lambda: [((), values[0])])
    metrics.counter("gateway_y_total", "Y.", ("a",), lambda: [(("b",), values[0])])
    for number in range(100):
        metrics.attempts.add((f"b{number}", "ok"))
    metrics.loop_lag.observe((), 0.01)
    taken = metrics.snapshot(lambda: breaths.append(None))
    values[0] = 2.0
    metrics.attempts.add(("b0", "ok"))
    metrics.loop_lag.observe((), 0.01)
    page = generate_latest(taken).decode()
    for line in ('gateway_x 1.0', 'gateway_y_total{a="b"} 1.0', "gateway_event_loop_lag_seconds_count 1.0",
                 'gateway_upstream_attempts_total{backend="b0",result="ok"} 1.0'):  # fmt: skip
        assert f"\n{line}\n" in page
    assert "# TYPE gateway_y_total counter" in page
    assert len(breaths) >= 2 * 100


def test_bounds_of_times_fit_embeddings_of_a_millisecond_and_streams_of_minutes() -> None:
    metrics = Metrics()
    for histogram, longest in ((metrics.first_byte, 100.0), (metrics.queue_wait, 100.0), (metrics.duration, 1000.0)):
        histogram.observe(("a", "b")[: len(histogram.labels)], 0.0005, longest)
        metric = histogram.family()
        counts = {sample.labels["le"]: sample.value for sample in metric.samples if "le" in sample.labels}
        assert counts["0.001"] == 1, histogram.name
        finite = sorted(float(bound) for bound in counts if bound != "+Inf")
        assert counts[str(finite[-1])] == 2, histogram.name
        steps = [high / low for low, high in pairwise(finite)]
        assert max(steps) <= 2.501, histogram.name
