"""What the front talks to, in memory."""

import re
from dataclasses import dataclass, field
from random import Random

from gateway.config import HealthConfig
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.settings import BackendConfig
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.reply import ClientResponse
from gateway.core.front.routes import Route
from tests.routes import find_route


@dataclass
class FakeWire:
    """Keeps what is written."""

    blocked: bool = False
    sent: bytes = b""
    was_cut: bool = False
    address: str = "192.0.2.1"

    def attach(self, reply: ClientResponse) -> None: ...

    def write(self, data: bytes) -> bool:
        self.sent += data
        return self.blocked

    @property
    def head(self) -> bytes:
        return self.sent.partition(b"\r\n\r\n")[0] + b"\r\n"

    @property
    def body(self) -> bytes:
        """The body, without chunks."""
        body = self.sent.partition(b"\r\n\r\n")[2]
        if b"transfer-encoding: chunked" not in self.head:
            return body
        return b"".join(re.findall(rb"(?s)[0-9a-f]+\r\n(.*?)\r\n(?=[0-9a-f]+\r\n|$)", body))

    def header(self, name: bytes) -> bytes | None:
        match = re.search(rb"(?mi)^" + re.escape(name) + rb": (.*)\r$", self.head)
        return match[1] if match else None

    @property
    def status(self) -> int:
        return int(self.sent.split(b" ", 2)[1])


@dataclass
class Clock:
    """Seconds that pass when the test sets them."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def reply_on(
    wire: FakeWire, *, keep_alive: bool = True, http10: bool = False, anthropic: bool = False
) -> ClientResponse:
    incoming = HttpRequest()
    incoming.http10, incoming.route = http10, Route("chat", anthropic=anthropic)
    return ClientResponse(wire, "id-1", incoming, keep_alive)


def fleet_of(*models: ModelCard, up: bool = True) -> Fleet:
    """One backend, `a`, that serves these models."""
    config = BackendConfig(url="http://10.0.0.1:8000", name="a")
    fleet = Fleet([config], HealthConfig(), clock=Clock(), random=Random(1))
    fleet.learned(fleet.backends[0], Facts(models=models or (ModelCard("m"),)))
    if up:
        fleet.probed(fleet.backends[0], ProbeResult.OK)
    else:
        fleet.probed(fleet.backends[0], ProbeResult.REFUSED)
    return fleet


@dataclass
class Sent:
    """A request as a client would send it."""

    path: bytes = b"/v1/chat/completions"
    body: bytes = b'{"model":"m","messages":[]}'
    method: bytes = b"POST"
    headers: dict[bytes, bytes] = field(default_factory=dict)

    def incoming(self) -> HttpRequest:
        """The same, read and admitted."""
        made = HttpRequest()
        made.method, made.path, made.body = self.method, self.path, self.body
        made.headers = {b"host": b"x"} | self.headers
        made.keep_alive = True
        made.arrived_seconds = 90.0
        made.route = find_route(self.method, self.path)
        return made
