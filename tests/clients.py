"""A client on a raw socket: sends what it likes, when it likes, and says exactly what came back and how it ended."""

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import orjson

DEADLINE_SECONDS = 10.0


@dataclass
class Answer:
    """One response. `complete`: its framing says that nothing is missing."""

    status: int = 0
    head: bytes = b""
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    complete: bool = False

    def header(self, name: str) -> str | None:
        """The value of a header; None if it is not there, an error if it is there twice."""
        values = [value for known, value in self.headers if known == name]
        assert len(values) < 2, f"{name} is there {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an error answer, which has OpenAI's shape."""
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}, found
        return dict(found)

    @property
    def events(self) -> list[bytes]:
        """The data of each event of a stream."""
        assert self.body.endswith(b"\n\n") or not self.body, self.body[-200:]
        return [event.removeprefix(b"data: ") for event in self.body.split(b"\n\n")[:-1]]

    @property
    def is_done(self) -> bool:
        """The stream ended as a complete one does."""
        return self.complete and self.events[-1:] == [b"[DONE]"]


class EndOfConnection(Exception):
    """The gateway closed the connection; `reset`: not in an orderly way."""

    def __init__(self, reset: bool) -> None:
        super().__init__("reset" if reset else "closed")
        self.reset = reset


class Client:
    """One connection to the gateway."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._buffer = bytearray()
        self.ended: EndOfConnection | None = None

    @classmethod
    async def connect(cls, port: int, *, receive_buffer_bytes: int | None = None) -> Self:
        """Connect to a port of this machine."""
        peer = socket.socket()
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer_bytes is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", port))
        except BaseException:
            peer.close()
            raise
        return cls(peer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def send(self, *pieces: bytes, seconds_apart: float = 0.0) -> None:
        """Send bytes, each piece on its own. Raises EndOfConnection."""
        loop = asyncio.get_running_loop()
        try:
            for piece in pieces:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await loop.sock_sendall(self._socket, piece)
                if seconds_apart:
                    await asyncio.sleep(seconds_apart)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            self.ended = EndOfConnection(reset=True)
            raise EndOfConnection(reset=True) from error

    async def read(self, at_most: int = 65536) -> bytes:
        """Some bytes. Raises EndOfConnection."""
        try:
            data = await asyncio.get_running_loop().sock_recv(self._socket, at_most)
        except ConnectionError as error:
            self.ended = EndOfConnection(reset=True)
            raise EndOfConnection(reset=True) from error
        if not data:
            self.ended = EndOfConnection(reset=False)
            raise EndOfConnection(reset=False)
        return data

    async def answer(self, deadline_seconds: float = DEADLINE_SECONDS) -> Answer:
        """The next response, as much of it as comes. Raises EndOfConnection if not even its head does."""
        answer = Answer()
        async with asyncio.timeout(deadline_seconds):
            while True:
                answer.head = await self._until(b"\r\n\r\n")
                line, *fields = answer.head[:-4].decode("latin-1").split("\r\n")
                answer.status = int(line.split(" ")[1])
                if answer.status != 100:
                    break
            answer.headers = [(name.lower(), value) for name, _, value in (each.partition(": ") for each in fields)]
            try:
                await self._body(answer)
                answer.complete = True
            except EndOfConnection:
                pass
        return answer

    async def _body(self, answer: Answer) -> None:
        if answer.header("transfer-encoding") == "chunked":
            assert answer.header("content-length") is None
            while size := int(await self._until(b"\r\n"), 16):
                answer.body += await self._exactly(size)
                await self._exactly(2)
            await self._exactly(2)
        elif (length := answer.header("content-length")) is not None:
            answer.body = await self._exactly(int(length))
        else:
            while True:
                answer.body += bytes(self._buffer)
                self._buffer.clear()
                self._buffer += await self.read()

    async def _until(self, mark: bytes) -> bytes:
        while (end := self._buffer.find(mark)) < 0:
            self._buffer += await self.read()
        return self._take(end + len(mark))

    async def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._buffer += await self.read()
        return self._take(count)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def end(self, deadline_seconds: float = DEADLINE_SECONDS) -> EndOfConnection:
        """How the gateway ends the connection; whatever still comes is dropped."""
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    await self.read()
        except EndOfConnection as ended:
            return ended

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Leave without a word."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        """Leave."""
        self._socket.close()


def request(
    body: bytes = b"", *headers: bytes, method: bytes = b"POST", target: bytes = b"/v1/chat/completions"
) -> bytes:
    """The bytes of a request with a Content-Length."""
    lines = [b"%b %b HTTP/1.1" % (method, target), b"host: gateway", *headers]
    if method == b"POST":
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chat(content: str = "Hello.", model: str = "scripted", **more: Any) -> bytes:
    """The body of a chat request."""
    return orjson.dumps({"model": model, "messages": [{"role": "user", "content": content}], **more})
