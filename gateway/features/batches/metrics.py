"""Counters of offline batches and of their lines."""

from gateway.core.observe.metrics import Counter, Metrics


class BatchCounters:
    """Counts the lines of offline batches, and the batches that have ended."""

    def __init__(self, metrics: Metrics) -> None:
        self.lines = Counter(
            "gateway_batch_lines_total",
            "Lines of offline batches: completed, failed, retried, paused, continued; never run: cancelled, expired.",
            ("state",),
        )
        self.batches = Counter(
            "gateway_batches_ended_total", "Offline batches that have ended, by status.", ("status",)
        )
        metrics.include(self.lines, self.batches)
