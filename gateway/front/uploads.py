"""Audio uploads: how many may hold a slot while they arrive, and the model in the form."""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gateway.backends.backend import Backend
from gateway.backends.fleet import Fleet
from gateway.errors import EndpointNotOffered, InvalidRequest, QueueFull, WaitExpired
from gateway.front.body import Upload
from gateway.front.reply import ClientResponse
from gateway.observe.record import Record
from gateway.request import InferenceRequest, UpstreamResult
from gateway.scheduling.fair_share import Backlog


class RequestDispatcher(Protocol):
    """Answers requests: the dispatcher, or a part that batches or splits them first."""

    async def dispatch(self, request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        """Answer through `reply`, and write `record` on the way. Raises a GatewayError."""


_SHARE = 4  # uploads that still arrive may hold one slot in four of a model
_REMEMBERED_SECONDS = 60.0
_RETRY_AFTER_SECONDS = 1.0


class Uploads:
    """Sends uploads. A complete one is a request like any other.

    One that is larger than what is collected here holds its slot while the client sends the rest. Of these, each model
    serves a quarter of its slots at once; the others wait in the queue's `backlog`, and are not read meanwhile.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: RequestDispatcher,
        backlog: Backlog,
        max_wait_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._backlog = backlog
        self._max_wait_seconds = max_wait_seconds
        self._clock = clock
        self._arriving: dict[str, int] = {}  # by model
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._refused: dict[tuple[str, str], float] = {}  # by backend and endpoint: when it was last refused
        fleet.on_restart.append(self._forget)

    def follow(self, max_wait_seconds: float) -> None:
        """Take over another queue timeout, for uploads that begin to wait."""
        self._max_wait_seconds = max_wait_seconds

    async def dispatch(self, request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        """Answer the upload through `reply`, as the dispatcher does. Raises a GatewayError."""
        upload, model, endpoint = request.upload, request.demand.model, request.endpoint
        assert isinstance(upload, Upload)
        backends, since = self._fleet.serving(model), self._clock()
        lately = since - _REMEMBERED_SECONDS
        if backends and all(self._refused.get((each.name, endpoint), lately) > lately for each in backends):
            raise EndpointNotOffered(f"The backends for model {model!r} do not support this endpoint.")
        if not upload.ended:
            await self._place(model, upload.held_bytes)
            upload.when_ended(lambda: self._left(model))
        try:
            record.waited(self._clock() - since)
            return await self._dispatcher.dispatch(request, reply, record)
        except EndpointNotOffered:
            self._refused[record.backend, endpoint] = self._clock()
            raise
        finally:
            record.uploaded(upload.came_bytes)
            if upload.when_ended(None):
                self._left(model)

    async def _place(self, model: str, size_bytes: int) -> None:
        """Take one of the model's places for uploads that still arrive, when there is one.

        Raises QueueFull or WaitExpired.
        """
        now, arriving = self._clock(), self._arriving.get(model, 0)
        if arriving < max(1, sum(backend.limit(now) for backend in self._fleet.serving(model) or ()) // _SHARE):
            self._arriving[model] = arriving + 1
            return
        if self._backlog.is_full_for(size_bytes, guarded=True):
            raise QueueFull(
                f"The queue is full: uploads for model {model!r} are in progress and {self._backlog.requests} requests"
                " are waiting. Retry after the time in the retry-after header.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(model, deque())
        waiting.append(waiter)
        seconds = self._max_wait_seconds
        self._backlog.join(size_bytes)
        try:
            async with asyncio.timeout(seconds):
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
                f" {seconds:g} s. Retry later.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            ) from error
        finally:
            self._backlog.leave(size_bytes)
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

    def _forget(self, backend: Backend) -> None:
        self._refused = {key: when for key, when in self._refused.items() if key[0] != backend.name}


_LOOK_BYTES = 1048576
_FIELD = b"\ncontent-disposition:"
# No form that a client library writes has longer lines or more of them; so no upload makes the search slow.
_LINE_BYTES = 1024
_HEADERS = 8
_FIELDS = 100
_PART_BYTES = (_HEADERS + 3) * _LINE_BYTES
_VALUE = re.compile(rb"(?:[^\r\n]{1,1022}\r\n){0,8}\r\n([^\r\n]{0,1022})\r\n")  # one line, behind other headers


async def model_of(upload: Upload, only_model: str | None) -> str:
    """The form field `model`. What was read to find it is put back. Raises InvalidRequest."""
    pieces: list[bytes] = []
    size = looked_at = 0
    found = None
    async for piece in upload:
        pieces.append(piece)
        size += len(piece)
        if size >= 2 * looked_at:  # pieces may be single bytes: each byte is searched twice, not thousands of times
            found = _model_in(b"".join(pieces), max(0, looked_at - _PART_BYTES))
            looked_at = size
        if found or size > _LOOK_BYTES:
            break
    found = found or _model_in(b"".join(pieces), max(0, looked_at - _PART_BYTES))
    upload.put_back(pieces)
    if found:
        return found.decode("utf-8", "replace")
    if only_model is not None:
        return only_model
    raise InvalidRequest(
        f"The form field `model` is missing in the first {_LOOK_BYTES} bytes: send it before the file.", param="model"
    )


def _model_in(data: bytes, start: int) -> bytes | None:
    """The value of the first field of that name, if all of it is there. Headers before `start` are not searched."""
    lower = data.lower()
    looked, at = 0, lower.find(_FIELD, start)
    while at >= 0 and looked < _FIELDS:
        header = lower[at + 1 : at + 1 + _LINE_BYTES].partition(b"\n")[0]
        if header.endswith(b"\r") and _names_model(header):
            looked += 1
            value = _VALUE.match(data, at + 1 + len(header) + 1)
            if value is not None and value[1]:
                return value[1]
        at = lower.find(_FIELD, at + 1)
    return None


def _names_model(header: bytes) -> bool:
    """Whether the first parameter `name` of the header, in lower case, is `model`."""
    for parameter in header.rstrip(b"\r").split(b";")[1:]:
        name, _, value = parameter.strip(b" \t").partition(b"=")
        if name == b"name":
            return value in (b"model", b'"model"')
    return False
