"""Operators' changes on the admin port while the gateway runs: backends, the configuration by a reload, and the process
by a restart."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from gateway.config import Config, ConfigError
from gateway.config.errors import error_lines
from gateway.core.backends.backend import Backend
from gateway.core.backends.membership import Membership
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import InvalidRequest, RestartFailed
from gateway.core.listeners import addresses_of
from gateway.core.threads import Threads
from gateway.features.operate.admin_http import as_json, body_of
from gateway.features.operate.reload import Reloads

TAKES_OVER = "GATEWAY_TAKES_OVER"  # the environment variable with the address of the process to take over from
_MOST_WAIT_SECONDS = 60.0  # of one request; clients ask again
_LOOK_SECONDS = 0.05
_MOST_START_SECONDS = 120.0  # until the new process serves


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
        """Its routes on the admin port."""
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


class RestartCheck:
    """The handler of a restart in a worker: its parent starts the new process if the worker finds no mistake."""

    def __init__(self, load: Callable[[], Config], config: Config) -> None:
        self._load, self._config = load, config
        self._threads = Threads("restart")

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/admin/restart", self._restart)]

    async def _restart(self, _: web.Request) -> web.Response:
        if _of_parent(await _loaded(self._threads, self._load)) != _of_parent(self._config):
            raise InvalidRequest(
                "Nothing was changed. server.workers and the addresses of ports are those of the process that started"
                " the workers. Stop the gateway and start it to change them."
            )
        return as_json({"pid": os.getpid()})


def _of_parent(config: Config) -> object:
    return config.server.workers, addresses_of(config.server)


async def _loaded(threads: Threads, load: Callable[[], Config]) -> Config:
    """The configuration as a new process would read it. Raises InvalidRequest."""
    try:
        return await threads.run(load)
    except ConfigError as error:
        raise InvalidRequest(f"Nothing was changed. {error}") from error


class Restart:
    """The handler that starts a successor of this process, with its command line and environment.

    `successor_pid` is of the process that has taken over, once `began` is set. A successor that does not take over is
    ended, and this process continues.
    """

    def __init__(
        self, load: Callable[[], Config], address: bytes, began: asyncio.Event, *, successor_pid: Callable[[], int]
    ) -> None:
        self._load = load
        self._address = address
        self._began = began
        self._successor_pid = successor_pid
        self._threads = Threads("restart")
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/admin/restart", self._restart)]

    async def _restart(self, _: web.Request) -> web.Response:
        await _loaded(self._threads, self._load)
        async with self._one_at_a_time:
            if self._began.is_set():
                raise RestartFailed(f"Process {self._successor_pid()} has taken over already.")
            await self._start()
        return as_json({"pid": self._successor_pid(), "former_pid": os.getpid()})

    async def _start(self) -> None:
        """Start the new process, and wait until it serves. Raises RestartFailed."""
        environment = os.environ | {TAKES_OVER: self._address.hex()}
        try:  # not uvloop's: its children inherit descriptors
            process = await self._threads.run(subprocess.Popen, sys.orig_argv, env=environment)
        except OSError as error:
            raise RestartFailed(f"Nothing was changed. {sys.orig_argv[0]} cannot be started: {error}.") from error
        loop = asyncio.get_running_loop()
        ended, began = loop.create_task(_ended(process)), loop.create_task(self._began.wait())
        try:
            await asyncio.wait((ended, began), timeout=_MOST_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if began.done():
                return
            if ended.done():
                how = f"ended with exit code {process.returncode}"
            else:
                how = f"did not serve within {_MOST_START_SECONDS:g} s, and was ended"
                process.kill()
            raise RestartFailed(f"Nothing was changed. The new process {how}. Its reasons are in the gateway's log.")
        finally:
            ended.cancel()
            began.cancel()


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:  # noqa: ASYNC110 - without a thread for each
        await asyncio.sleep(0.1)
