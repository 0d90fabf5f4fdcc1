"""The metrics of several workers on one page."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed_text

from gateway.features.workers.exposition import merged


def registry_of(number: int) -> CollectorRegistry:
    """Metrics of a worker: with labels, without, and with what a label's value may have in it."""
    registry = CollectorRegistry()
    Gauge("depth", "Depth.", registry=registry).set(number)
    counter = Counter("requests", "Requests.", ("path",), registry=registry)
    counter.labels('a{b="c"} #, d').inc(10 + number)
    Histogram("seconds", "Seconds.", registry=registry, buckets=(1.0,)).observe(0.5, {"trace_id": "t"})
    return registry


def own() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("workers", "Workers.", registry=registry).set(2)
    return registry


@pytest.mark.parametrize("form", ["text", "openmetrics"])
def test_every_sample_has_the_label_of_its_worker_and_families_are_described_once(form: str) -> None:
    if form == "text":
        from prometheus_client import generate_latest as encode
    else:
        encode = openmetrics.generate_latest
    page = merged(encode(own()), {number: encode(registry_of(number)) for number in (0, 1)}).decode()
    parse = parsed_text if form == "text" else parsed_openmetrics
    families = {family.name: family for family in parse(page)}
    samples = {
        (sample.name, sample.labels.get("worker"), sample.labels.get("path")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["workers", None, None] == 2
    for number in (0, 1):
        assert samples["depth", str(number), None] == number
        assert samples["requests_total", str(number), 'a{b="c"} #, d'] == 10 + number
        assert samples["seconds_count", str(number), None] == 1
    assert page.count("# TYPE depth ") == page.count("# HELP depth ") == 1
    assert page.endswith("# EOF\n") == (form == "openmetrics")
    assert page.count("# EOF") == (form == "openmetrics")


def test_a_worker_that_has_no_metrics_yet_changes_nothing() -> None:
    page = b"# HELP depth Depth.\n# TYPE depth gauge\ndepth 1.0\nempty{} 2.0\n"
    assert merged(b"", {0: page, 1: b""}) == (
        b'# HELP depth Depth.\n# TYPE depth gauge\ndepth{worker="0"} 1.0\nempty{worker="0"} 2.0\n'
    )
