"""A backend whose /v1/realtime speaks vLLM's protocol: a delta for each piece of audio, the text at the end."""

import asyncio
import base64
import json
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import WSMsgType, web


@dataclass(eq=False)
class Session:
    """One session as the engine saw it. `code`: of the close frame that ended it; 1006 = there was none."""

    request_id: str
    headers: dict[str, str]
    socket: web.WebSocketResponse
    events: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None

    @property
    def kinds(self) -> list[str]:
        """The types of the events that arrived."""
        return [event["type"] for event in self.events]


class RealtimeEngine:
    """`async with RealtimeEngine("voxtral") as engine:` serves at `engine.url`. `endless`: a commit starts a flood."""

    def __init__(self, model: str = "scripted", delta: str = "la", *, endless: bool = False, usage: Any = None) -> None:
        """`usage`: what it reports of each transcription."""
        self._usage = usage
        self.model = model
        self.sessions: list[Session] = []
        self.deaf = asyncio.Event()  # set: read nothing more
        self._delta = delta
        self._endless = endless
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def open(self) -> list[Session]:
        """The sessions that have not ended."""
        return [session for session in self.sessions if session.code is None]

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/realtime", self._session)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        self._delta = ""  # it may be long, and what was sent, too
        self.sessions.clear()

    async def stop(self) -> None:
        """Break off every session and refuse connections."""
        if self._runner is not None:
            for session in self.open:
                self.cut(session)
            await self._runner.cleanup()
            self._runner = None

    def cut(self, session: Session) -> None:
        """Close the connection without a close frame, as a process that dies does."""
        transport = session.socket._req.transport if session.socket._req is not None else None
        if transport is not None:
            transport.abort()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "max_model_len": 8192, "owned_by": "vllm"}
        return web.json_response({"object": "list", "data": [card]})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        headers = {name.lower(): value for name, value in request.headers.items()}
        session = Session(headers.get("x-request-id", ""), headers, socket)
        self.sessions.append(session)
        await socket.send_json({"type": "session.created", "id": f"sess-{len(self.sessions)}", "created": 1})
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    session.events.append(json.loads(message.data))
                    await self._answer(session, session.events[-1])
        finally:
            session.code = socket.close_code or 1006
        return socket

    async def _answer(self, session: Session, event: dict[str, Any]) -> None:
        socket, pieces = session.socket, session.kinds.count("input_audio_buffer.append")
        if event["type"] == "session.update" and event["model"] != self.model:
            await socket.send_json({"type": "error", "error": f"The model `{event['model']}` does not exist."})
        elif event["type"] == "input_audio_buffer.append":
            base64.b64decode(event["audio"])
            await socket.send_json({"type": "transcription.delta", "delta": self._delta})
            if self.deaf.is_set():
                await asyncio.Event().wait()
        elif event["type"] == "input_audio_buffer.commit" and event.get("final"):
            await socket.send_json({"type": "transcription.done", "text": self._delta * pieces, "usage": self._usage})
        elif event["type"] == "input_audio_buffer.commit":
            while self._endless:
                await socket.send_json({"type": "transcription.delta", "delta": self._delta})
