"""Sends a request to a backend over a pooled connection, and watches the answers in progress."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import ceil

from gateway.config import UpstreamConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.errors import FirstByteTimeout, unwrapped
from gateway.core.relay.connection import BackendConnection, P, Pool
from gateway.core.relay.upstream import UpstreamResponse
from gateway.core.request import BodyStream, InferenceRequest, Kind, Sink, UpstreamResult
from gateway.core.resources import MemoryBudget
from gateway.core.supervisor import Supervisor
from gateway.core.tls.contexts import BackendContexts

_LOOK_SECONDS = 1.0


class Relay:
    """Owner of the connection pools and of the responses in progress."""

    def __init__(
        self,
        fleet: Fleet,
        config: UpstreamConfig,
        *,
        clock: Callable[[], float],
        memory: MemoryBudget,
        comment_seconds: float = 0.0,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._fleet = fleet
        self._memory = memory
        self._pools: dict[Backend, Pool] = {}
        self._clock = clock
        self._tls = BackendContexts()
        self._config = config
        self._comment_seconds = ceil(comment_seconds)  # whole looks
        self._supervisor = supervisor or Supervisor(clock)
        self._under_way: set[UpstreamResponse] = set()
        fleet.on_change.append(self._follow_fleet)
        fleet.on_leave.append(lambda backend: self._pools.pop(backend).close())
        self._follow_fleet()

    def apply(self, config: UpstreamConfig, comment_seconds: float) -> None:
        """Take over other settings, also for running answers."""
        self._config, self._comment_seconds = config, ceil(comment_seconds)
        for pool in self._pools.values():
            pool.apply(config)

    def _follow_fleet(self) -> None:
        for backend in self._fleet.backends:
            if (pool := self._pools.get(backend)) is None:
                self._pools[backend] = Pool(backend, self._config, self._clock, tls=self._tls)
            else:
                pool.apply(self._config)

    def __repr__(self) -> str:
        return f"<Relay {len(self._under_way)} answers under way>"

    def __len__(self) -> int:
        return len(self._under_way)

    async def send(
        self,
        request: InferenceRequest,
        backend: Backend,
        sink: Sink,
        first_token: Callable[[], None],
        on_tokens: Callable[[int], int],
        *,
        rank: int | None = None,
        fresh: bool = False,
        last: bool = False,
    ) -> UpstreamResult:
        """Send the request and pass the answer on until its last byte. `rank` names one of the backend's engines;
        `first_token` and `on_tokens` as in `UpstreamResponse`; `fresh` = over a new connection; `last` = the request is
        not sent again, even if the backend goes down before its first byte.

        Raises a BackendError; `sink.begun` is then true if the client has seen anything. When cancelled, the connection
        is closed, which makes the backend abort the request.
        """
        pool = self._pools[backend]
        connection = (None if fresh else pool.take_idle()) or await pool.take_new()
        movable = request.repeatable and not last
        response = UpstreamResponse(
            request, backend, connection, sink, first_token, on_tokens, self._clock, self._memory, movable
        )
        self._under_way.add(response)
        try:
            headers, body = request.headers, request.body
            if rank is not None and request.kind is Kind.GENERATE:
                headers += b"x-data-parallel-rank: %d\r\n" % rank
            if request.method != b"GET":
                framing = b"content-length: %d" % len(body) if request.upload is None else b"transfer-encoding: chunked"
                headers = b"%bcontent-type: %b\r\n%b\r\n" % (headers, request.content_type, framing)
            head = b"%b %b%b%b\r\n" % (request.method, request.target, pool.constant_head, headers)
            connection.send(head, response, body)
            if request.upload is not None:
                await self._send_upload(request.upload, connection, response)
            outcome = await response.done
            return outcome if isinstance(outcome, UpstreamResult) else unwrapped(outcome)
        except asyncio.CancelledError:
            if response.answered:
                return unwrapped(response.done.result())  # the client disconnected with its whole response
            raise
        finally:
            self._under_way.remove(response)
            pool.give_back(connection, answered=response.close())

    async def connect(self, backend: Backend, make: Callable[[], P]) -> P:
        """A separate connection, not for an exchange. Raises ConnectFailed or OutOfDescriptors."""
        return await self._pools[backend].connect(make)

    def constant_head(self, backend: Backend) -> bytes:
        """The constant part of the head of every request to this backend, after method and target."""
        return self._pools[backend].constant_head

    async def _send_upload(self, upload: BodyStream, connection: BackendConnection, response: UpstreamResponse) -> None:
        """Pass an upload on piece by piece, as fast as the backend reads it; its answer may already arrive."""
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

    async def _drained(self, connection: BackendConnection) -> None:
        """Wait until the backend reads more. With a timeout, because a client's disconnect is not noticed meanwhile."""
        try:
            async with asyncio.timeout(self._config.idle_stream_timeout_seconds):
                await connection.drained()
        except TimeoutError as error:
            seconds = self._config.idle_stream_timeout_seconds
            message = f"Timeout: the backend read no data of the upload for {seconds:g} s."
            raise FirstByteTimeout(message, silent_since=self._clock() - seconds) from error

    def close_idle(self) -> None:
        """Close the connections that no request uses."""
        for pool in self._pools.values():
            pool.close()

    def watching(self) -> AbstractContextManager[None]:
        """Cut answers that have stalled, while the block runs."""
        return self._supervisor.looking("answer_watch", self._watch, _LOOK_SECONDS)

    def _watch(self) -> None:
        now = self._clock()
        # Exchanges with output first: another request's output shows that a backend works.
        for response in sorted(self._under_way, key=lambda each: not each.heard):
            with self._supervisor.guard("answer_watch"):
                response.watch(
                    now, _LOOK_SECONDS, self._config, comment_seconds=self._comment_seconds, fleet=self._fleet
                )
