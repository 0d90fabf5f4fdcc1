"""The HTTP server of a simulated engine, and its table of routes."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Final, TypeAlias

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from pydantic import ValidationError

from loadtest.engine.api import errors, operations
from loadtest.engine.api.audio import transcribe
from loadtest.engine.api.chat import chat_batch, chat_completions
from loadtest.engine.api.completions import completions
from loadtest.engine.api.errors import ApiError
from loadtest.engine.api.exchange import empty_answer, error_answer
from loadtest.engine.api.messages import count_tokens, messages
from loadtest.engine.api.operations import detokenize, tokenize
from loadtest.engine.api.pooling import classify, embed, embeddings, pooling, rerank, score
from loadtest.engine.api.responses import cancel_response, create_response, get_response
from loadtest.engine.config import EngineConfig
from loadtest.engine.fault_injection import play_opening, play_whole
from loadtest.engine.faults import Faults
from loadtest.engine.ledger import Ending, Ledger, LedgerEntry
from loadtest.engine.ranks import new_engines, new_publishers
from loadtest.engine.service import Service

Handler: TypeAlias = Callable[[Service, web.BaseRequest, LedgerEntry], Awaitable[web.StreamResponse]]
Routes: TypeAlias = Mapping[str, Mapping[str, Handler]]

_OPERATIONS: Routes = {
    "/health": {"GET": operations.health},
    "/ping": {"GET": operations.health, "POST": operations.health},
    "/version": {"GET": operations.version},
    "/load": {"GET": operations.load},
    "/metrics": {"GET": operations.metrics},
    "/v1/models": {"GET": operations.models},
    "/kv_event_sources": {"GET": operations.kv_event_sources},
    "/tokenize": {"POST": tokenize},
    "/detokenize": {"POST": detokenize},
}
_GENERATION: Routes = {
    "/v1/chat/completions": {"POST": chat_completions},
    "/v1/chat/completions/batch": {"POST": chat_batch},
    "/v1/completions": {"POST": completions},
    "/v1/responses": {"POST": create_response},
    "/v1/responses/{response_id}": {"GET": get_response},
    "/v1/responses/{response_id}/cancel": {"POST": cancel_response},
    "/v1/messages": {"POST": messages},
    "/v1/messages/count_tokens": {"POST": count_tokens},
    "/v1/audio/transcriptions": {"POST": transcribe},
    "/v1/audio/translations": {"POST": transcribe},
}
_POOLING: Routes = {
    "/v1/embeddings": {"POST": embeddings},
    "/v2/embed": {"POST": embed},
    "/pooling": {"POST": pooling},
    "/classify": {"POST": classify},
    **{path: {"POST": score} for path in ("/score", "/v1/score")},
    **{path: {"POST": rerank} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
}
_SIMULATION: Routes = {
    "/sim/ledger": {"GET": operations.ledger, "DELETE": operations.ledger},
    "/sim/restart": {"POST": operations.restart},
    "/sim/faults": {"GET": operations.faults, "POST": operations.faults, "DELETE": operations.faults},
}
_DANGEROUS = (
    "/pause",
    "/resume",
    "/collective_rpc",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/release_kv_cache_memory",
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/inference/v1/generate",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/fault_tolerance/apply",
    "/start_profile",
    "/stop_profile",
    "/invocations",
    "/v1/unload_lora_adapter",
    "/init_weight_transfer_engine",
    "/update_weights",
)
_DEV_MODE: Routes = {
    **{path: {"POST": operations.accept} for path in _DANGEROUS},
    "/sleep": {"POST": operations.sleep},
    "/v1/load_lora_adapter": {"POST": operations.load_lora_adapter},
    "/wake_up": {"POST": operations.wake_up},
    "/reset_prefix_cache": {"POST": operations.reset_prefix_cache},
    "/server_info": {"GET": operations.server_info},
    "/is_sleeping": {"GET": operations.is_sleeping},
    "/is_paused": {"GET": operations.accept},
    "/tokenizer_info": {"GET": operations.accept},
    "/docs": {"GET": operations.accept},
    "/openapi.json": {"GET": operations.accept},
}
# What is asked for every second or so, by whoever watches an engine.
PROBES = frozenset({"/health", "/ping", "/version", "/load", "/metrics", "/v1/models", "/kv_event_sources"})
# Requests that count as load and that scripts apply to.
INFERENCE = frozenset({*_GENERATION, *_POOLING})


def routes(config: EngineConfig) -> Routes:
    """The routes of an engine with that configuration."""
    table: dict[str, Mapping[str, Handler]] = dict(_OPERATIONS)
    table.update(_POOLING if config.embedding else _GENERATION)
    if config.dev_mode or config.control:
        table.update(_DEV_MODE)
    if config.control:
        table.update(_SIMULATION)
    return MappingProxyType(table)


_KEPT_ENTRIES: Final = 200_000
# aiohttp waits twice for handlers; 0 would mean for ever.
_CLEANUP_SECONDS: Final = 0.05
_GUARDED: Final = ("/v1", "/v2", "/inference", "/cohere")


def _unix_seconds() -> float:
    return time.time_ns() / 1e9


class SimulatedEngine:
    """`async with SimulatedEngine(config) as engine:` serves at `engine.url`."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        unix_seconds: Callable[[], float] = _unix_seconds,
        seed: int | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self._unix_seconds = unix_seconds
        self._random = random.Random(seed)
        self._service: Service | None = None
        self._server: web.Server | None = None
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self._routes: Routes = routes(self.config)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def service(self) -> Service:
        """The engine's state, for tests in the same process."""
        assert self._service is not None, "the engine is not started"
        return self._service

    @property
    def port(self) -> int:
        """The port that is listened at."""
        assert self._runner is not None, "the engine is not started"
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self.port}"

    async def __aenter__(self) -> "SimulatedEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, and publish KV events if so configured."""
        loop = asyncio.get_running_loop()
        config = self.config
        kv_events = new_publishers(config, self._unix_seconds)
        if kv_events is not None:
            await kv_events.open()
        self._service = Service(
            config=config,
            engine=new_engines(config, kv_events, loop),
            kv_events=kv_events,
            unix_seconds=self._unix_seconds,
            random=self._random,
            ledger=Ledger(loop.time, _KEPT_ENTRIES if config.control else 0),
            faults=Faults.none(),
            started_unix_seconds=self._unix_seconds(),
            restart=self.restart,
        )
        try:
            await self._listen()
        except BaseException:
            if kv_events is not None:
                await kv_events.close()
            raise

    async def _listen(self) -> None:
        config = self.config
        self._server = web.Server(
            self._handle,
            handler_cancellation=True,
            tcp_keepalive=False,
            keepalive_timeout=config.keep_alive_seconds,
            access_log=None,
            request_factory=self._make_request,
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=_CLEANUP_SECONDS)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, config.host, config.port, backlog=2048)
        await self._site.start()

    async def stop(self) -> None:
        """Refuse new connections, let requests end for the configured time, then fail the rest."""
        if self._runner is None or self._site is None:
            return
        await self._site.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.shutdown_timeout_seconds):
                await self._idle.wait()
        self.service.stop_background()
        self.service.engine.fail_all(errors.engine_dead())
        await self._runner.cleanup()
        self.service.engine.close()
        if self.service.kv_events is not None:
            await self.service.kv_events.close()
        self._runner = None

    async def restart(self, keep: web.BaseRequest | None = None) -> None:
        """Become a new process at the same ports: connections break, caches, counters and sequence numbers are new.

        The connection of the request `keep` stays, so that it can be answered.
        """
        service = self.service
        assert self._server is not None, "the engine is not started"
        for connection in self._server.connections:
            transport = connection.transport
            if transport is not None and (keep is None or transport is not keep.transport):
                transport.abort()
        service.engine.close()
        publishers = service.kv_events
        kv_events = new_publishers(self.config, self._unix_seconds, publishers)
        service.become_new(new_engines(self.config, kv_events, asyncio.get_running_loop()), kv_events)
        if publishers is not None:
            await publishers.close()
        if kv_events is not None:
            await kv_events.open()

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        """A request with this engine's limit on bodies."""
        limit = self.config.max_body_bytes
        return web.BaseRequest(
            message,
            payload=payload,
            protocol=protocol,
            payload_writer=writer,
            task=task,
            loop=task.get_loop(),
            client_max_size=limit,
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer, with the request's id in a header if so configured. A stream's headers are sent by then."""
        response = await self._dispatch(request)
        if self.config.request_id_headers and not response.prepared:
            response.headers["X-Request-Id"] = self.service.request_id(request)
        return response

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        """Probes and /sim/ leave no trace in the ledger; all else does, whatever becomes of it."""
        path = request.path
        if path in PROBES or path.startswith("/sim/"):
            response = await self._answer(request, LedgerEntry(request.method, path, 0.0))
            self._count(request.method, path, response.status)
            return response
        try:
            entry = self._begin(request, path)
        except ValidationError as problem:
            return error_answer(ApiError(400, f"x-sim-script: {problem}"), path)
        return await self._recorded(request, entry)

    async def _recorded(self, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
        service, script = self.service, entry.script
        service.begin(entry)
        self._idle.clear()
        ending = Ending.ABORTED
        try:
            response = await play_opening(request, entry, script) if script is not None else None
            if response is None:
                response = await self._answer(request, entry)
                if script is not None and not response.prepared:
                    response = await play_whole(request, entry, script, response)
            ending = Ending.FINISHED if response.status < 400 else Ending.REFUSED
            entry.answered(response.status)
            self._count(entry.method, entry.path, response.status)
            return response
        except ConnectionResetError:
            # The client left while it was being answered: nothing reads this.
            return empty_answer(499)
        finally:
            service.end(entry, ending)
            if not service.ledger.in_flight:
                self._idle.set()

    async def _answer(self, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
        try:
            handler = self._find(entry.method, entry.path)
            self._authenticate(request, entry.path)
            return await handler(self.service, request, entry)
        except ApiError as error:
            return error_answer(error, entry.path)
        except web.HTTPRequestEntityTooLarge:
            return error_answer(ApiError(413, "Request body too large", "Request Entity Too Large"), entry.path)

    def _begin(self, request: web.BaseRequest, path: str) -> LedgerEntry:
        inference = path in INFERENCE
        if not self.config.control:
            return self.service.ledger.begin(
                request.method, path, raw_path=path, headers=(), script=None, inference=inference
            )
        headers = [(str(name), value) for name, value in request.headers.items()]
        script = self.service.faults.script_for(request.headers.get("x-sim-script")) if inference else None
        return self.service.ledger.begin(
            request.method, path, raw_path=request.raw_path, headers=headers, script=script, inference=inference
        )

    def _find(self, method: str, path: str) -> Handler:
        methods = self._routes.get(path)
        if methods is None and path.startswith("/v1/responses/"):
            methods = self._routes.get("/v1/responses/{response_id}" + ("/cancel" if path.endswith("/cancel") else ""))
        if methods is None:
            raise errors.not_found()
        handler = methods.get(method)
        if handler is None:
            raise errors.method_not_allowed(", ".join(methods))
        return handler

    def _authenticate(self, request: web.BaseRequest, path: str) -> None:
        key = self.config.api_key
        if key is None or not path.startswith(_GUARDED):
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or token != key:
            raise errors.unauthorised()

    def _count(self, method: str, path: str, status: int) -> None:
        self.service.count(path if path in self._routes else "none", method, status)
