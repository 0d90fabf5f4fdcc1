"""`gateway restart`: this process starts its successor, with its own command line and environment."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

from aiohttp import web

from gateway.admin_http import as_json
from gateway.config import Config, ConfigError
from gateway.errors import InvalidRequest, RestartFailed
from gateway.handover.predecessor import Predecessor

TAKES_OVER = "GATEWAY_TAKES_OVER"  # the environment variable with the address of the process to take over from
_MOST_SECONDS = 120.0  # until the new process serves


class Restart:
    """The handler of the admin port. A process that does not take over is ended, and this one goes on."""

    def __init__(self, load: Callable[[], Config], address: bytes, predecessor: Predecessor) -> None:
        self._load = load
        self._address = address
        self._predecessor = predecessor
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/admin/restart", self._restart)]

    async def _restart(self, _: web.Request) -> web.Response:
        if os.getpid() == 1:
            raise InvalidRequest(
                "This gateway is process 1 of a container, which ends with it. Replace the container instead."
            )
        try:
            await asyncio.to_thread(self._load)
        except ConfigError as error:
            raise InvalidRequest(f"Nothing was changed. {error}") from error
        async with self._one_at_a_time:
            if self._predecessor.began.is_set():
                raise RestartFailed(f"Process {self._predecessor.successor_pid} has taken over already.")
            await self._start()
        return as_json({"pid": self._predecessor.successor_pid, "former_pid": os.getpid()})

    async def _start(self) -> None:
        """Start the new process, and wait until it serves. Raises RestartFailed."""
        environment = os.environ | {TAKES_OVER: self._address.hex()}
        try:  # not uvloop's: its children inherit descriptors
            process = await asyncio.to_thread(subprocess.Popen, sys.orig_argv, env=environment)
        except OSError as error:
            raise RestartFailed(f"Nothing was changed. {sys.orig_argv[0]} cannot be started: {error}.") from error
        loop = asyncio.get_running_loop()
        ended, began = loop.create_task(_ended(process)), loop.create_task(self._predecessor.began.wait())
        try:
            await asyncio.wait((ended, began), timeout=_MOST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if began.done():
                return
            if ended.done():
                how = f"ended with exit code {process.returncode}"
            else:
                how = f"did not serve within {_MOST_SECONDS:g} s, and was ended"
                process.kill()
            raise RestartFailed(f"Nothing was changed. The new process {how}. Its reasons are in the gateway's log.")
        finally:
            ended.cancel()
            began.cancel()


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:  # noqa: ASYNC110 - without a thread for each
        await asyncio.sleep(0.1)
