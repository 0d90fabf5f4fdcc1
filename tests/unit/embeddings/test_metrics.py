"""Metrics of batches are on the page."""

from prometheus_client import CollectorRegistry, generate_latest

from gateway.core.observe.metrics import Metrics
from gateway.features.embeddings.metrics import EmbeddingMetrics


def test_what_is_counted_is_shown() -> None:
    metrics = Metrics()
    counted = EmbeddingMetrics(metrics)
    counted.batch_items.observe(("m",), 3)
    counted.flushes.add(("m", "idle"))
    registry = CollectorRegistry()
    registry.register(metrics)
    page = generate_latest(registry).decode()
    assert 'gateway_embedding_batch_items_bucket{le="4.0",model="m"} 1.0' in page
    assert 'gateway_embedding_flushes_total{model="m",reason="idle"} 1.0' in page
