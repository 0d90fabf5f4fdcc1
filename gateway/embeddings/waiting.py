"""Requests in the gateway's own hands that wait for their turn: counted with all that waits, and for how long."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from gateway.admission.backlog import Backlog
from gateway.errors import DeadlineUnmeetable, QueueFull, WaitExpired
from gateway.request import InferenceRequest

Who = TypeVar("Who")


class Waiting(Generic[Who]):
    """Owner of who waits here. `retry_after` tells when one who is refused may come again.

    `busy` says in words what keeps backends busy.
    """

    def __init__(
        self, backlog: Backlog, max_wait_seconds: float, retry_after: Callable[[str], float], busy: str
    ) -> None:
        self._backlog = backlog
        self._max_wait_seconds = max_wait_seconds
        self._retry_after = retry_after
        self._busy = busy
        self._sizes: dict[Who, int] = {}  # bytes of their requests

    def __len__(self) -> int:
        return len(self._sizes)

    def join(self, who: Who, request: InferenceRequest) -> None:
        """Wait from now on."""
        self._sizes[who] = request.ask.size_bytes
        self._backlog.join(request.ask.size_bytes)

    def leave(self, who: Who) -> None:
        """Wait no more. Safe to call again."""
        size_bytes = self._sizes.pop(who, None)
        if size_bytes is not None:
            self._backlog.leave(size_bytes)

    def refuse_if_full(self, request: InferenceRequest) -> None:
        """Raises QueueFull where as many requests or bytes wait as may: ask before one that cannot go at once."""
        model, backlog = request.ask.model, self._backlog
        if backlog.is_full_for(request.ask.size_bytes, guarded=True):
            raise QueueFull(
                f"The queue is full: the backends for model {model!r} are busy with other {self._busy} and"
                f" {backlog.requests} requests are waiting. Retry after the time in the retry-after header.",
                retry_after_seconds=self._retry_after(model),
            )

    @asynccontextmanager
    async def in_time(self, request: InferenceRequest, since: float) -> AsyncIterator[asyncio.Timeout]:
        """Have the block done before its time to wait is over, or until the block says that it waits no more.

        `since`: when the wait began, on the gateway's clock. Raises WaitExpired or DeadlineUnmeetable.
        """
        model, deadline, most = request.ask.model, request.ask.deadline_seconds, self._max_wait_seconds
        kind: type[WaitExpired | DeadlineUnmeetable] = WaitExpired
        until = f"the queue timeout of {most:g} s"
        if deadline is not None and deadline - since < most:
            most, until, kind = deadline - since, "this request's deadline", DeadlineUnmeetable
        try:
            async with asyncio.timeout(most) as timeout:
                yield timeout
        except TimeoutError as error:
            raise kind(
                f"The backends for model {model!r} were busy with other {self._busy} until {until}.",
                retry_after_seconds=self._retry_after(model),
            ) from error
