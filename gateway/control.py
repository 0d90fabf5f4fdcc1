"""What operators can change on the admin port while the gateway runs: backends, and the configuration by a reload."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from gateway.admin_http import as_json, body_of
from gateway.backends.backend import Backend
from gateway.backends.membership import Membership
from gateway.config import ConfigError
from gateway.config.backends import BackendConfig
from gateway.config.errors import error_lines
from gateway.errors import InvalidRequest
from gateway.reload import Reloads

_MOST_WAIT_SECONDS = 60.0  # of one request; clients ask again
_LOOK_SECONDS = 0.05


class Control:
    """The handlers of the admin port that change something. `describe` makes a backend's document."""

    def __init__(
        self,
        membership: Membership,
        describe: Callable[[Backend], dict[str, Any]],
        reloads: Reloads,
    ) -> None:
        self._membership = membership
        self._describe = describe
        self._reloads = reloads

    def routes(self) -> list[web.RouteDef]:
        """What the admin port serves of it."""
        return [
            web.post("/admin/reload", self._reload),
            web.post("/admin/backends", self._add),
            web.delete("/admin/backends/{name}", self._remove),
            web.post("/admin/backends/{name}/drain", self._drain),
            web.post("/admin/backends/{name}/undrain", self._undrain),
        ]

    async def _reload(self, _: web.Request) -> web.Response:
        try:
            return as_json(await self._reloads.reload())
        except ConfigError as error:
            raise InvalidRequest(f"Nothing was changed. {error}") from error

    async def _add(self, request: web.Request) -> web.Response:
        try:
            config = BackendConfig.model_validate(orjson.loads(await body_of(request)))
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
        except ValidationError as error:
            wrong = "; ".join(error_lines(error, within=("backends", 0)))
            raise InvalidRequest(f"Invalid backend: {wrong}.") from error
        return as_json({"backend": self._describe(self._membership.add(config))}, 201)

    async def _remove(self, request: web.Request) -> web.Response:
        backend = self._membership.remove(request.match_info["name"])
        return await self._when_drained(request, backend)

    async def _drain(self, request: web.Request) -> web.Response:
        backend = self._membership.drain(request.match_info["name"])
        return await self._when_drained(request, backend)

    async def _undrain(self, request: web.Request) -> web.Response:
        return as_json({"backend": self._describe(self._membership.undrain(request.match_info["name"]))})

    async def _when_drained(self, request: web.Request, backend: Backend) -> web.Response:
        """Answer once nothing is in flight there, or after the time that the client is willing to wait."""
        seconds = _wait_seconds(request.query.get("wait_seconds", "0"))
        is_drained = await until(lambda: not backend.in_flight, seconds, asyncio.sleep)
        return as_json({"backend": self._describe(backend), "drained": is_drained})


def _wait_seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_WAIT_SECONDS:
        raise InvalidRequest(f"The parameter wait_seconds must be a number from 0 to {_MOST_WAIT_SECONDS:g}.")
    return seconds


async def until(condition: Callable[[], bool], seconds: float, sleep: Callable[[float], Awaitable[object]]) -> bool:
    """Whether a condition holds, now or within this time."""
    waited = 0.0
    while not (holds := condition()) and waited < seconds:
        await sleep(_LOOK_SECONDS)
        waited += _LOOK_SECONDS
    return holds
