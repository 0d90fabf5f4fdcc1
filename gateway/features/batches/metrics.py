"""Metrics of offline batches, their lines and their files."""

from collections.abc import Mapping
from typing import Protocol

from gateway.core.observe.metrics import Counter, Metrics


class RunningBatches(Protocol):
    """The batches that have not ended: how many are in each state, and how many use more than idle capacity."""

    def states(self) -> Mapping[str, int]: ...
    def promoted(self) -> Mapping[str, int]: ...
    @property
    def used_bytes(self) -> int: ...


class BatchMetrics:
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
        self._metrics = metrics

    def watch(self, batches: RunningBatches) -> None:
        """Show the batches that have not ended, and the size of files."""
        gauge = self._metrics.gauge
        gauge(
            "gateway_batches",
            "Offline batches that have not ended, by status; paused: no room, no bucket, or no tokens left of the key.",
            ("status",),
            lambda: [((state,), count) for state, count in batches.states().items()],
        )
        gauge(
            "gateway_batches_promoted",
            "Offline batches that use more than idle capacity, by the class of their requests: time is short.",
            ("class",),
            lambda: [((name,), count) for name, count in batches.promoted().items()],
        )
        text = "Size of uploaded files and results of batches."
        gauge("gateway_batch_files_bytes", text, (), lambda: [((), batches.used_bytes)])
