"""The smallest useful feature: an endpoint that answers by itself, counts the requests of all, and has a gauge."""

from collections.abc import Callable, Iterable, Mapping

import orjson

from gateway.core.core import Core
from gateway.core.front.handler import LocalApi
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.reply import JSON, ClientResponse
from gateway.core.front.routes import Route
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.feature import Feature


class Greetings(Feature):
    """Greets a client, and says how many requests have ended."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ended = 0

    def routes(self) -> Mapping[tuple[bytes, bytes], Route]:
        return {(b"GET", b"/v1/greeting/{id}"): Route("greeting", local=True, answered_by="greetings")}

    def apis(self) -> Mapping[str, LocalApi]:
        return {"greetings": self}

    def consumers(self) -> Iterable[Callable[[Record], None]]:
        return (self._count,)

    def add_gauges(self, metrics: Metrics) -> None:
        metrics.gauge("gateway_ended_requests", "Requests that have ended.", (), lambda: [((), self._ended)])

    async def answer(self, incoming: HttpRequest, owner: tuple[str, str], reply: ClientResponse) -> None:
        self._core.finished.settle()
        name = incoming.path.rpartition(b"/")[2].decode()
        reply.send(200, JSON, b"", orjson.dumps({"greeting": f"Hello, {name}.", "key": owner[0], "ended": self._ended}))

    def _count(self, record: Record) -> None:
        self._ended += 1
