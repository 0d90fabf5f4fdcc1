"""Long commands to backends, such as to wake, concurrent with all other work of the loop."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from contextlib import AsyncExitStack
from typing import Any, Self

from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Clock
from gateway.core.backends.vllm_api import ControlClient
from gateway.core.supervisor import Supervisor

_LOOK_SECONDS = 0.2
_TIMEOUT_SECONDS = 120.0  # of weights on their way from or to the GPU, or of a download
_AGAIN_SECONDS = 30.0  # after a failure


class Commands:
    """The commands of one kind, inside its `async with` block, where `look` is called again and again.

    One command at a time runs for the same `key`. A failed command `may_run` again after a while.
    """

    def __init__(self, name: str, look: Callable[[], None], clock: Clock, *, supervisor: Supervisor) -> None:
        self._name = name
        self._look = look
        self._clock = clock
        self._supervisor = supervisor
        self._client = ControlClient(_TIMEOUT_SECONDS, clock)
        self._running: dict[Hashable, asyncio.Task[None]] = {}
        self._not_before: dict[Hashable, float] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._client)
        self._stack.enter_context(self._supervisor.looking(self._name, self._look, _LOOK_SECONDS))
        return self

    async def __aexit__(self, *_: object) -> None:
        running = [*self._running.values()]
        for command in running:
            command.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._stack.aclose()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    def start(self, key: Hashable, command: Coroutine[Any, Any, None]) -> None:
        """Run a command, which may `send`. None runs for this key."""
        task = self._running[key] = asyncio.create_task(command, name=self._name)
        task.add_done_callback(lambda _: self._running.pop(key))

    async def send(self, backend: Backend, path: str, document: dict[str, str] | None = None) -> None:
        """Post to a path, and wait until that is done. Raises ControlError."""
        await self._client.command(backend.config, path, document)

    def may_run(self, what: Hashable) -> bool:
        """Whether it has not failed lately."""
        return self._clock() >= self._not_before.get(what, 0.0)

    def forget(self, what: Hashable) -> None:
        self._not_before.pop(what, None)

    def failed(self, what: Hashable) -> None:
        now = self._clock()
        self._not_before = {each: at for each, at in self._not_before.items() if at > now}
        self._not_before[what] = now + _AGAIN_SECONDS
