"""Sends a request to a backend and passes the answer to the client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from math import ceil

from gateway.backends.backend import Backend
from gateway.backends.fleet import Fleet
from gateway.config import UpstreamConfig
from gateway.errors import FirstByteTimeout, FreshConnectionClosed, StreamStalled
from gateway.relay.connection import BackendConnection, Pool
from gateway.relay.upstream import Exchange, Sink, UpstreamResult
from gateway.request import InferenceRequest, Kind
from gateway.supervisor import Supervisor

_LOOK_SECONDS = 1.0
_GONE_SECONDS = 10.0  # a backend that refuses connections may leave those it has open and silent for ever


class Relay:
    """Owner of the pools and of the answers under way."""

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
        self._under_way: dict[Exchange, Backend] = {}

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
        came: Callable[[int], int],
        *,
        rank: int | None = None,
        fresh: bool = False,
    ) -> UpstreamResult:
        """Send the request and pass the answer on until its last byte. `rank` names one of the backend's engines.

        `first_token` is told when a stream begins, `came` how many tokens of it have come since it was last told; it
        says how many more may come before it wants to hear again.

        Raises a BackendError; `sink.begun` then tells whether the client has seen anything. When cancelled, the
        connection is closed, which makes the backend abort the request.
        """
        pool = self._pools[backend]
        connection = await pool.take(fresh=fresh)
        exchange = Exchange(sink, connection, first_token, came, self._clock, request.done_marker, request.hides_usage)
        exchange.streams = request.ask.streams
        exchange.on_opening = request.on_opening
        self._under_way[exchange] = pool.backend
        try:
            head = pool.request_head(request.method, request.target) + request.headers
            if rank is not None and request.kind is Kind.GENERATE:
                head += b"x-data-parallel-rank: %d\r\n" % rank
            if request.upload is not None:
                return await self._send_upload(head, request, connection, exchange)
            connection.send(_head(head, request), exchange, request.body)
            return await exchange.done
        except asyncio.CancelledError:
            if exchange.answered:
                return exchange.done.result()  # the client left with its whole answer
            raise
        finally:
            del self._under_way[exchange]
            sink.on_room = None
            if not exchange.answered:
                exchange.tell_rest()
            pool.give_back(connection, answered=exchange.answered)

    async def _send_upload(
        self, head: bytes, request: InferenceRequest, connection: BackendConnection, exchange: Exchange
    ) -> UpstreamResult:
        """Pass an upload on piece by piece, as fast as the backend takes it, while its answer may already come."""
        upload = request.upload
        assert upload is not None
        connection.send(
            b"%bcontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % (head, request.content_type), exchange
        )
        whole = False
        exchange.done.add_done_callback(lambda _: upload.close())  # answered early: wait for no more of it
        try:
            async for piece in upload:
                if exchange.done.done() or connection.transport is None:
                    break
                connection.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await self._drained(connection)
            else:
                whole = not exchange.done.done()
                if whole and connection.transport is not None:
                    connection.transport.write(b"0\r\n\r\n")
        finally:
            if not whole:
                connection.abort()  # what is sent next here would be taken for the rest of the body
        return await exchange.done

    async def _drained(self, connection: BackendConnection) -> None:
        """Wait until the backend takes more; not for ever, for meanwhile its client's leaving goes unnoticed."""
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
            for exchange, backend in list(self._under_way.items()):
                try:
                    self._look_at(exchange, backend)
                except Exception as error:
                    self._supervisor.caught("answer_watch", error)

    def _look_at(self, exchange: Exchange, backend: Backend) -> None:
        if exchange.heard:
            backend.health.heard_at = self._clock()  # its answers come, however slow its /health is
        if exchange.heard or exchange.paused:
            exchange.heard = False
            exchange.silent_seconds = 0.0
            return
        exchange.silent_seconds += _LOOK_SECONDS
        if exchange.streams and self._comment_seconds and not exchange.silent_seconds % self._comment_seconds:
            exchange.comment()
        config, silent = self._config, exchange.silent_seconds
        first_byte, silence = config.first_byte_timeout_seconds, f"The backend sent no data for {silent:g} s."
        if backend.health.gone and silent >= _GONE_SECONDS:
            exchange.give_up(FreshConnectionClosed(f"{silence} It refuses connections."))
        elif exchange.begun and silent >= config.idle_stream_timeout_seconds:
            exchange.give_up(StreamStalled(silence))
        elif not exchange.begun and first_byte is not None and silent >= first_byte:
            exchange.give_up(FirstByteTimeout(silence))


def _head(lines: bytes, request: InferenceRequest) -> bytes:
    if request.method == b"GET":
        return lines + b"\r\n"
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (lines, request.content_type, len(request.body))
