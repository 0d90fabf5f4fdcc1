"""Audio uploads on their way to a backend: few at a time while they still arrive, and none where none is offered."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.backends.backend import Backend
from gateway.backends.registry import Fleet
from gateway.dispatch import Dispatcher
from gateway.errors import EndpointNotOffered, WaitExpired
from gateway.front.reply import Reply
from gateway.front.upload import Upload
from gateway.observe.record import Record
from gateway.relay.exchange import UpstreamResult
from gateway.request import InferenceRequest

_SHARE = 4  # one of so many slots of a model may be held by an upload that still arrives
_REMEMBERED_SECONDS = 60.0
_RETRY_AFTER_SECONDS = 1.0


class Uploads:
    """Sends uploads. A complete one is a request like any other.

    One that is larger than what is collected here holds its slot while the client sends the rest. Of these, each model
    serves a quarter of its slots at once; the others wait, and are not read meanwhile.
    """

    def __init__(
        self, fleet: Fleet, dispatcher: Dispatcher, max_wait_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._max_wait_seconds = max_wait_seconds
        self._clock = clock
        self._arriving: dict[str, int] = {}  # by model
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._refused: dict[tuple[str, str], float] = {}  # by backend and endpoint: when it was last refused
        fleet.on_restart.append(self._forget)

    async def dispatch(self, request: InferenceRequest, reply: Reply, record: Record) -> UpstreamResult:
        """Answer the upload through `reply`, as the dispatcher does. Raises a GatewayError."""
        upload, model, endpoint = request.upload, request.ask.model, request.endpoint
        assert isinstance(upload, Upload)
        self._refuse_what_is_not_offered(model, endpoint)
        since = self._clock()
        async with self._turn(model, upload):
            record.queue_seconds += self._clock() - since
            try:
                return await self._dispatcher.dispatch(request, reply, record)
            except EndpointNotOffered:
                self._refused[record.backend, endpoint] = self._clock()
                raise

    def _refuse_what_is_not_offered(self, model: str, endpoint: str) -> None:
        """Raises EndpointNotOffered if all of the model's backends have lately said so."""
        backends, since = self._fleet.serving(model), self._clock() - _REMEMBERED_SECONDS
        if backends and all(self._refused.get((each.name, endpoint), since) > since for each in backends):
            raise EndpointNotOffered(f"The backends for model {model!r} do not support this endpoint.")

    @asynccontextmanager
    async def _turn(self, model: str, upload: Upload) -> AsyncIterator[None]:
        """One of the model's places for uploads that still arrive, until this one has. Raises WaitExpired."""
        if upload.ended:
            yield
            return
        await self._place(model)
        upload.on_end = lambda: self._left(model)
        try:
            yield
        finally:
            if upload.on_end is not None:
                upload.on_end = None
                self._left(model)

    async def _place(self, model: str) -> None:
        arriving = self._arriving.get(model, 0)
        if arriving < self._share(model):
            self._arriving[model] = arriving + 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(model, deque())
        waiting.append(waiter)
        try:
            async with asyncio.timeout(self._max_wait_seconds):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self._left(model)  # granted in the same turn as the timeout or a cancellation
            elif waiter in waiting:
                waiting.remove(waiter)
            if not isinstance(error, TimeoutError):
                raise
            raise WaitExpired(
                f"Queue timeout: too many uploads for model {model!r} are in progress, none completed within"
                f" {self._max_wait_seconds:g} s. Retry later.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            ) from error
        finally:
            if not waiting and self._waiting.get(model) is waiting:
                del self._waiting[model]

    def _left(self, model: str) -> None:
        """A place is free: it goes to the upload that has waited longest."""
        waiting = self._waiting.get(model)
        while waiting:
            waiter = waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._arriving[model] -= 1
        if not self._arriving[model]:
            del self._arriving[model]

    def _share(self, model: str) -> int:
        now = self._clock()
        return max(1, sum(backend.limit(now) for backend in self._fleet.serving(model) or ()) // _SHARE)

    def _forget(self, backend: Backend) -> None:
        for key in [key for key in self._refused if key[0] == backend.name]:
            del self._refused[key]
