"""Sends a request to a backend and passes the answer to the client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import ceil

from gateway.backends.backend import Backend
from gateway.backends.fleet import Fleet
from gateway.config import UpstreamConfig
from gateway.errors import FirstByteTimeout, FreshConnectionClosed, StreamStalled
from gateway.relay.connection import BackendConnection, Pool
from gateway.relay.upstream import UpstreamResponse
from gateway.request import InferenceRequest, Kind, Sink, UpstreamResult
from gateway.supervisor import Supervisor

_LOOK_SECONDS = 1.0
_GONE_SECONDS = 10.0  # a backend that refuses connections may leave open ones silent forever


class Relay:
    """Owner of the connection pools and of the responses in progress."""

    def __init__(
        self,
        fleet: Fleet,
        config: UpstreamConfig,
        clock: Callable[[], float],
        comment_seconds: float = 0.0,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._pools = {backend.name: Pool(backend, config, clock) for backend in fleet.backends}
        self._config = config
        self._clock = clock
        self._comment_seconds = ceil(comment_seconds)  # whole looks
        self._supervisor = supervisor or Supervisor(clock)
        self._under_way: dict[UpstreamResponse, Backend] = {}

    def __repr__(self) -> str:
        return f"<Relay {len(self._under_way)} answers under way>"

    def __len__(self) -> int:
        return len(self._under_way)

    def backend(self, name: str) -> Backend:
        return self._pools[name].backend

    async def send(
        self,
        request: InferenceRequest,
        backend: str,
        sink: Sink,
        first_token: Callable[[], None],
        on_tokens: Callable[[int], int],
        *,
        rank: int | None = None,
        fresh: bool = False,
    ) -> UpstreamResult:
        """Send the request and pass the answer on until its last byte. `rank` names one of the backend's engines.

        `first_token` is called when a stream begins, `on_tokens` with the number of tokens since its last call; it
        returns how many more may come before its next call.

        Raises a BackendError; `sink.begun` is then true if the client has seen anything. When cancelled, the connection
        is closed, which makes the backend abort the request.
        """
        pool = self._pools[backend]
        connection = await pool.take(fresh=fresh)
        response = UpstreamResponse(
            sink,
            connection,
            first_token,
            on_tokens,
            self._clock,
            request.done_marker,
            request.hides_usage,
            request.demand.streams,
            None if request.on_opening is None else partial(request.on_opening, backend),
        )
        self._under_way[response] = pool.backend
        try:
            head = pool.request_head(request.method, request.target) + request.headers
            if rank is not None and request.kind is Kind.GENERATE:
                head += b"x-data-parallel-rank: %d\r\n" % rank
            if request.upload is not None:
                return await self._send_upload(head, request, connection, response)
            if request.method == b"GET":
                head += b"\r\n"
            else:
                head += b"content-type: %b\r\ncontent-length: %d\r\n\r\n" % (request.content_type, len(request.body))
            connection.send(head, response, request.body)
            return await response.done
        except asyncio.CancelledError:
            if response.answered:
                return response.done.result()  # the client disconnected with its whole response
            raise
        finally:
            del self._under_way[response]
            pool.give_back(connection, answered=response.close())

    async def _send_upload(
        self, head: bytes, request: InferenceRequest, connection: BackendConnection, response: UpstreamResponse
    ) -> UpstreamResult:
        """Pass an upload on piece by piece, as fast as the backend reads it; its answer may already arrive."""
        upload = request.upload
        assert upload is not None
        connection.send(
            b"%bcontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % (head, request.content_type), response
        )
        whole = False
        response.done.add_done_callback(lambda _: upload.close())  # answered early: wait for no more of it
        try:
            async for piece in upload:
                if response.done.done() or connection.transport is None:
                    break
                connection.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await self._drained(connection)
            else:
                whole = not response.done.done()
                if whole and connection.transport is not None:
                    connection.transport.write(b"0\r\n\r\n")
        finally:
            if not whole:
                connection.abort()  # the backend would read the next request as the rest of the body
        return await response.done

    async def _drained(self, connection: BackendConnection) -> None:
        """Wait until the backend reads more. With a timeout, because a client's disconnect is not noticed meanwhile."""
        try:
            async with asyncio.timeout(self._config.idle_stream_timeout_seconds):
                await connection.drained()
        except TimeoutError as error:
            seconds = self._config.idle_stream_timeout_seconds
            raise FirstByteTimeout(f"Timeout: the backend read no data of the upload for {seconds:g} s.") from error

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Cut answers that have stalled, while the block runs; then close idle connections."""
        watch = asyncio.get_running_loop().create_task(self._watch(), name="relay-watch")
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            for pool in self._pools.values():
                pool.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for response, backend in list(self._under_way.items()):
                try:
                    self._look_at(response, backend)
                except Exception as error:
                    self._supervisor.caught("answer_watch", error)

    def _look_at(self, response: UpstreamResponse, backend: Backend) -> None:
        if response.heard:
            backend.health.heard_at = self._clock()  # it responds, however slow its /health is
        config, silent = self._config, response.silence(_LOOK_SECONDS)
        if not silent:
            return
        if response.streams and self._comment_seconds and not silent % self._comment_seconds:
            response.comment()
        first_byte, silence = config.first_byte_timeout_seconds, f"The backend sent no data for {silent:g} s."
        if backend.health.gone and silent >= _GONE_SECONDS:
            response.give_up(FreshConnectionClosed(f"{silence} It refuses connections."))
        elif response.begun and silent >= config.idle_stream_timeout_seconds:
            response.give_up(StreamStalled(silence))
        elif not response.begun and first_byte is not None and silent >= first_byte:
            response.give_up(FirstByteTimeout(silence))
