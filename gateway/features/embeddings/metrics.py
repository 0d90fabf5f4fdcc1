"""Metrics of embeddings batches."""

from gateway.core.observe.metrics import Counter, Histogram, Metrics

_ITEMS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_TOKENS = (16.0, 64.0, 256.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0)
_WAIT = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


class EmbeddingMetrics:
    """Counts batches. Only models that backends serve become labels."""

    def __init__(self, metrics: Metrics) -> None:
        model = ("model",)
        self.batch_items = Histogram(
            "gateway_embedding_batch_items", "Inputs per embeddings batch.", model, bounds=_ITEMS
        )
        self.batch_tokens = Histogram(
            "gateway_embedding_batch_tokens", "Estimated tokens per embeddings batch.", model, bounds=_TOKENS
        )
        self.batch_wait = Histogram(
            "gateway_embedding_batch_wait_seconds",
            "Time that inputs waited for their batch to be sent.",
            model,
            bounds=_WAIT,
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
        metrics.include(
            self.batch_items,
            self.batch_tokens,
            self.batch_wait,
            self.flushes,
            self.isolations,
            self.splits,
            self.counted,
        )
