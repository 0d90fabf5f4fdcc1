"""Audio uploads: the model in the form, and how many may hold a slot while they arrive."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.errors import EndpointNotOffered, InvalidRequest, ModelNotFound, QueueFull, WaitExpired
from gateway.core.front.body import Upload
from gateway.core.front.connection import ClientConnection
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.read import RequestReader, permitted, upstream_headers
from gateway.core.front.reply import ClientResponse, RequestDispatcher
from gateway.core.front.routes import Route
from gateway.core.observe.record import Record
from gateway.core.request import DONE_MARKER, Demand, InferenceRequest, Kind, ModelChoice, UpstreamResult
from gateway.core.scheduling.fair_share import Backlog
from gateway.features.uploads.forms import FormParser, boundary_of, content_type_of

UPLOADS: Final = "uploads"
UPLOAD_ROUTES = {
    (b"POST", path): Route(endpoint, Kind.UPLOAD, path, source=UPLOADS, done_marker=DONE_MARKER, max_body_bytes=None)
    for endpoint, path in (
        ("transcriptions", b"/v1/audio/transcriptions"),
        ("translations", b"/v1/audio/translations"),
    )
}
_SHARE = 4  # uploads that still arrive may hold one slot in four of a model
_REMEMBERED_SECONDS = 60.0
_RETRY_AFTER_SECONDS = 1.0


class Uploads:
    """Reads and sends uploads. A complete one is a request like any other.

    A larger upload holds its slot while the client sends the rest. Each model serves these in a quarter of its slots;
    the others wait in the queue's `backlog`, and are not read meanwhile.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: RequestDispatcher,
        *,
        backlog: Backlog,
        max_wait_seconds: float,
        max_buffered_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._backlog = backlog
        self._max_wait_seconds = max_wait_seconds
        self._max_buffered_bytes = max_buffered_bytes
        self._clock = clock
        self._arriving: dict[str, int] = {}  # by model
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._refused: dict[tuple[str, str], float] = {}  # by backend and endpoint: when it was last refused
        fleet.on_restart.append(self._forget)

    def apply(self, max_wait_seconds: float, max_buffered_bytes: int) -> None:
        """Take over another queue timeout, and how much may come before the form field `model`."""
        self._max_wait_seconds = max_wait_seconds
        self._max_buffered_bytes = max_buffered_bytes

    async def read(
        self,
        incoming: HttpRequest,
        route: Route,
        connection: ClientConnection,  # noqa: ARG002
        reply: ClientResponse,
        reader: RequestReader,
    ) -> InferenceRequest:
        """The request for an upload, once its model is known. Raises a GatewayError."""
        headers, key, upload = incoming.headers, incoming.key, incoming.upload
        assert upload is not None
        boundary, only_model = boundary_of(headers.get(b"content-type", b"")), self._fleet.only_model()
        form = UploadForm(upload, boundary)
        asked = await form.look(0 if only_model else self._max_buffered_bytes)
        if not (asked or only_model or form.is_complete):
            raise InvalidRequest(
                f"The form field `model` is missing in the first {self._max_buffered_bytes} bytes"
                " (server.max_buffered_upload_bytes): send it before the file.",
                param="model",
            )
        name = permitted(asked or only_model, key)
        model = reader.model_of(name, incoming, route.kind, {})

        def accepted(given: str) -> str:
            """The name for the backend; a late one may differ from the expected one."""
            if given != name and reader.model_of(permitted(given, key), incoming, route.kind, {}) != model:
                raise ModelNotFound.of(given)
            return model

        form.rename(accepted)
        length = headers.get(b"content-length")
        tenant, weight, batch, deadline_seconds = reader.scheduling.read(incoming, streams=form.streams)
        return InferenceRequest(
            route.endpoint,
            route.kind,
            method=incoming.method,
            target=route.target,
            demand=Demand(
                model,
                tenant=tenant,
                weight=weight,
                batch=batch,
                deadline_seconds=deadline_seconds,
                size_bytes=upload.held_bytes,
                streams=form.streams,
            ),
            request_id=reply.request_id,
            upload=form,
            worked_bytes=_UNKNOWN_BYTES if length is None else int(length),
            content_type=content_type_of(boundary),
            headers=upstream_headers(incoming, reply.request_id),
            done_marker=route.done_marker,
            repeatable=False,
            dispatcher=UPLOADS,
            explains=headers.get(b"x-gateway-explain") == b"1",
            model_choice=ModelChoice(name) if name != model else None,
        )

    async def dispatch(self, request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        """Answer the upload through `reply`, as the dispatcher does. Raises a GatewayError."""
        form, model, endpoint = request.upload, request.demand.model, request.endpoint
        assert isinstance(form, UploadForm)
        upload = form.upload
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
        """Take one of the model's places for incomplete uploads, once one is free.

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


_ACTED_ON: Final = frozenset(("model", "stream"))
_TRUE: Final = frozenset(("true", "1", "on", "yes", "t", "y"))  # as vLLM reads the field `stream`
_UNKNOWN_BYTES = 1048576  # of an upload without a content-length


class UploadForm:
    """The form of an upload, which is parsed before it is passed on, and passed on with another name for the model.

    Parsed bytes stay in the upload; the rest is parsed when it is passed on.
    """

    def __init__(self, upload: Upload, boundary: bytes) -> None:
        self.upload = upload
        self._parser = FormParser(boundary, _ACTED_ON)
        self._form = self._parser.form
        self._accepts: Callable[[str], str] = str
        self._held = b""  # the start of the model's incomplete name
        self._passed_bytes = 0
        self._is_closed = False

    @property
    def is_complete(self) -> bool:
        return self._form.is_complete

    @property
    def streams(self) -> bool:
        return self._form.fields.get("stream", "").lower() in _TRUE

    async def look(self, limit_bytes: int) -> str:
        """Parse what is collected, and more of the upload until it has named its model; empty = it did not.

        Raises a GatewayError.
        """
        upload, form = self.upload, self._form
        await upload.collected()
        while form.parsed_bytes < upload.held_bytes or "model" not in form.fields:
            piece = await upload.peek(form.parsed_bytes, limit_bytes)
            if not piece:
                break
            self._parser.feed(piece)
            await asyncio.sleep(0)  # a piece may take milliseconds
        return form.fields.get("model", "")

    def rename(self, accepts: Callable[[str], str]) -> None:
        """Take the function that returns the backend's name for the client's model. It may raise a GatewayError."""
        self._accepts = accepts

    def close(self) -> None:
        self._is_closed = True
        self.upload.close()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        form = self._form
        while True:
            try:
                piece = await anext(self.upload)
            except StopAsyncIteration:
                if not self._is_closed:
                    form.check_end()
                raise
            known = form.parsed_bytes - self._passed_bytes - len(self._held)
            if known < len(piece):
                self._parser.feed(piece[known:])
            if passed := self._renamed(self._held + piece):
                return passed

    def _renamed(self, data: bytes) -> bytes:
        """The bytes of the form to pass on now, after adding `data`. Raises a GatewayError for the model's name."""
        self._held = b""
        start, end = self._form.spans.get("model", (-1, -1))
        at, after = start - self._passed_bytes, end - self._passed_bytes
        if not 0 <= at < len(data):
            self._passed_bytes += len(data)
            return data
        if not at < after <= len(data):
            self._held = data[at:]
            self._passed_bytes = start
            return data[:at]
        self._passed_bytes += len(data)
        return data[:at] + self._accepts(data[at:after].decode()).encode() + data[after:]
