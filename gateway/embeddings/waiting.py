"""Requests in the gateway's own hands that wait for their turn: how many may, and for how long."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from gateway.config import AdmissionConfig
from gateway.errors import DeadlineUnmeetable, QueueFull, WaitExpired
from gateway.request import InferenceRequest

Who = TypeVar("Who")


class Waiting(Generic[Who]):
    """Owner of who waits. `retry_after` tells when one who is refused may come again.

    `full` and `busy` say in words who waits for what already, and what keeps backends busy.
    """

    def __init__(self, bounds: AdmissionConfig, retry_after: Callable[[str], float], full: str, busy: str) -> None:
        self._bounds = bounds
        self._retry_after = retry_after
        self._full = full
        self._busy = busy
        self._sizes: dict[Who, int] = {}  # bytes of their requests
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def join(self, who: Who, request: InferenceRequest) -> None:
        """Wait from now on."""
        self._sizes[who] = request.ask.size_bytes
        self._bytes += request.ask.size_bytes

    def leave(self, who: Who) -> None:
        """Wait no more. Safe to call again."""
        self._bytes -= self._sizes.pop(who, 0)

    def refuse_what_is_too_much(self, request: InferenceRequest) -> None:
        """Raises QueueFull where as many wait as may. One may always."""
        bounds, waiting = self._bounds, len(self._sizes)
        over = self._bytes + request.ask.size_bytes > bounds.max_queued_bytes
        if waiting and (waiting >= bounds.max_queued_requests or over):
            raise QueueFull(
                f"{waiting} {self._full} already, the most that may.",
                retry_after_seconds=self._retry_after(request.ask.model),
            )

    @asynccontextmanager
    async def in_time(
        self, request: InferenceRequest, since: float, *, ends: bool = True
    ) -> AsyncIterator[asyncio.Timeout]:
        """Have the block done before its time to wait is over, or until the block says that it waits no more.

        `since`: when the wait began, on the gateway's clock; `ends`: it has an end. Raises WaitExpired or
        DeadlineUnmeetable.
        """
        model, deadline, most = request.ask.model, request.ask.deadline_seconds, self._bounds.max_wait_seconds
        kind: type[WaitExpired | DeadlineUnmeetable] = WaitExpired
        until = f"{most:g} s had passed"
        if deadline is not None and deadline - since < most:
            most, until, kind = deadline - since, "its deadline", DeadlineUnmeetable
        try:
            async with asyncio.timeout(most if ends else None) as timeout:
                yield timeout
        except TimeoutError as error:
            raise kind(
                f"The backends of model {model!r} were busy with other {self._busy} until {until}.",
                retry_after_seconds=self._retry_after(model),
            ) from error
