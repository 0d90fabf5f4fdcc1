"""The gateway with a recount of admission's sums while it runs; as a command with `python -m tests.recounted_gateway`.

The recount runs once a second, before metrics are collected, and after the gateway has stopped. What differs is counted
in `recount_violations_total` and logged as `recount_violation`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, BinaryIO

import structlog

from gateway import app, process
from gateway.__main__ import main as gateway_command
from gateway.config import Config
from gateway.observe.log import EventLog
from gateway.observe.metrics import Counter
from tests.recount import mismatches

MODULE = "tests.recounted_gateway"
VIOLATIONS = "recount_violations_total"
LOGGED = "recount_violation"
_EVERY_SECONDS = 1.0


class RecountedGateway(app.Gateway):
    """As the gateway; `violations` counts the sums that differed from their recount."""

    def __init__(
        self, config: Config, log_out: BinaryIO | None, clock: Callable[[], float] = time.monotonic,
        log: EventLog | None = None, load: Callable[[], Config] | None = None, secret: bytes | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, log_out, clock, log, load=load, secret=secret)
        self.violations = Counter(VIOLATIONS, "Sums of admission that differed from their recount.", ("what",))
        self.metrics.include(self.violations)
        settle = self.metrics.before_collecting

        def settle_and_recount() -> None:
            settle()
            self.recount()

        self.metrics.before_collecting = settle_and_recount

    def recount(self) -> list[tuple[str, str]]:
        """What differs now, and on which backend."""
        engines = [engine for backend in self.fleet.backends for engine in backend.all_engines]
        found = mismatches(engines, self.queue)
        for what, backend in found:
            self.violations.add((what,))
            structlog.get_logger("gateway").error(LOGGED, what=what, backend=backend)
        return found

    @asynccontextmanager
    async def running(self, *start: Any) -> AsyncIterator[int | None]:
        """Serve and recount while the block runs; gives the admin port."""
        async with (
            super().running(*start) as admin,
            self.supervisor.repeating("recount", self._recount_repeatedly, _EVERY_SECONDS),
        ):
            yield admin
        self.recount()

    async def _recount_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            self.recount()


def main() -> None:
    """The command `gateway`, which builds a gateway of this kind."""
    process.Gateway = RecountedGateway  # type: ignore[misc]
    gateway_command()


if __name__ == "__main__":
    main()
