"""The gateway with a recount of admission's sums while it runs; as a command with `python -m tests.recounted_gateway`.

The recount runs once a second, before metrics are collected, and after the gateway has stopped. What differs is counted
in `recount_violations_total` and logged as `recount_violation`.

The command runs without the collector of cycles, and counts what `tests/live_bytes.py` finds: `recount_live_bytes` is 0
whenever no request is under way. After the gateway has stopped, the log has what is left, and what refers to it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, BinaryIO

import structlog

from gateway import app, process
from gateway.__main__ import main as gateway_command
from gateway.config import Config
from gateway.core.observe.log import EventLog
from gateway.core.observe.metrics import Counter
from gateway.features.table import FEATURES, FeatureEntry
from tests import live_bytes
from tests.recount import mismatches

MODULE = "tests.recounted_gateway"
VIOLATIONS = "recount_violations_total"
LIVE_BYTES = "recount_live_bytes"
LOGGED = "recount_violation"
_EVERY_SECONDS = 1.0
_SOON_SECONDS = 2.0  # in which threads drop what they work on


class RecountedGateway(app.Gateway):
    """As the gateway; `violations` counts the sums that differed from their recount."""

    def __init__(
        self, config: Config, log_out: BinaryIO | None, clock: Callable[[], float] = time.monotonic,
        log: EventLog | None = None, load: Callable[[], Config] | None = None, secret: bytes | None = None,
        features: Sequence[FeatureEntry] = FEATURES,
    ) -> None:  # fmt: skip
        super().__init__(config, log_out, clock, log=log, load=load, secret=secret, features=features)
        self.violations = Counter(VIOLATIONS, "Sums of admission that differed from their recount.", ("what",))
        self.core.metrics.include(self.violations)
        settle = self.core.metrics.before_collecting

        def settle_and_recount() -> None:
            settle()
            self.recount()

        self.core.metrics.before_collecting = settle_and_recount

    def recount(self) -> list[tuple[str, str]]:
        """What differs now, and on which backend."""
        engines = [engine for backend in self.core.fleet.backends for engine in backend.all_engines]
        found = mismatches(engines, self.core.queue)
        for what, backend in found:
            self.violations.add((what,))
            structlog.get_logger("gateway").error(LOGGED, what=what, backend=backend)
        return found

    @asynccontextmanager
    async def running(self, *start: Any) -> AsyncIterator[int | None]:
        """Serve and recount while the block runs; gives the admin port."""
        async with (
            super().running(*start) as admin,
            self.core.supervisor.repeating("recount", self._recount_repeatedly, _EVERY_SECONDS),
        ):
            yield admin
        self.recount()

    async def _recount_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            self.recount()


class CountedBytesGateway(RecountedGateway):
    """Counts the large bytes in memory, too. Only one is in a process."""

    @asynccontextmanager
    async def running(self, *start: Any) -> AsyncIterator[int | None]:
        """Serve and recount while the block runs; gives the admin port."""
        live_bytes.starting()
        total = [((), 0.0)]
        self.core.metrics.gauge(LIVE_BYTES, "Bytes in large objects, of requests under way.", (), lambda: total)
        settle = self.core.metrics.before_collecting

        def settle_and_count() -> None:
            settle()
            total[0] = (), float(sum(map(len, live_bytes.large_bytes())))

        self.core.metrics.before_collecting = settle_and_count
        async with super().running(*start) as admin:
            yield admin
        if left := live_bytes.leak(_SOON_SECONDS):
            structlog.get_logger("gateway").error(LOGGED, what=left, backend="")


def main() -> None:
    """The command `gateway`, which builds a gateway of this kind."""
    process.Gateway = CountedBytesGateway  # type: ignore[misc]
    gateway_command()


if __name__ == "__main__":
    main()
