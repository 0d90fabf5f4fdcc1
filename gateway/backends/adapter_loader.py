"""LoRA adapters that the configuration names are loaded when requests wait for them.

One backend at a time: the first when a request comes for an adapter that none has, another one while requests still
wait. vLLM needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for this; a backend that refuses is asked again after a while.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

import structlog

from gateway.backends.backend import Backend
from gateway.backends.facts import ModelCard
from gateway.backends.fleet import Clock, Fleet
from gateway.backends.vllm_api import ControlClient, ControlError
from gateway.config.models import LoraConfig
from gateway.supervisor import Supervisor

_LOOK_SECONDS = 0.2
_TIMEOUT_SECONDS = 120.0  # of a download, too
_AGAIN_SECONDS = 30.0  # after a failure
_PATH = "/v1/load_lora_adapter"

log = structlog.get_logger()


def backend_for(fleet: Fleet, name: str, base: str, refused: Callable[[Backend], bool]) -> Backend | None:
    """The backend of the base model that should load an adapter: the one with the least in flight."""
    able = [each for each in fleet.serving(base) or () if name not in each.context_tokens and not refused(each)]
    return min(able, key=lambda each: each.in_flight, default=None)


class AdapterLoader:
    """Loads adapters inside its `async with` block. `waiting` counts the requests for a model."""

    def __init__(self, fleet: Fleet, waiting: Callable[[str], int], clock: Clock, supervisor: Supervisor) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._clock = clock
        self._supervisor = supervisor
        self._client = ControlClient(_TIMEOUT_SECONDS, clock)
        self._adapters: Mapping[str, LoraConfig] = {}
        self._commands: dict[str, asyncio.Task[None]] = {}  # by adapter
        self._not_before: dict[tuple[str, str], float] = {}  # by adapter and backend
        self._stack = AsyncExitStack()

    def follow(self, adapters: Mapping[str, LoraConfig]) -> None:
        """Take over other adapters. Those that are loaded stay loaded."""
        self._adapters = adapters
        self._fleet.expect_adapters({name: adapter.base for name, adapter in adapters.items()})

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._client)
        await self._stack.enter_async_context(self._supervisor.repeating("adapters", self._step, _LOOK_SECONDS))
        return self

    async def __aexit__(self, *_: object) -> None:
        commands = [*self._commands.values()]
        for command in commands:
            command.cancel()
        await asyncio.gather(*commands, return_exceptions=True)
        await self._stack.aclose()

    async def _step(self) -> None:
        await asyncio.sleep(_LOOK_SECONDS)
        for name, adapter in self._adapters.items():
            if name not in self._commands and self._waiting(name):
                self._look(name, adapter)

    def _look(self, name: str, adapter: LoraConfig) -> None:
        now = self._clock()
        self._not_before = {key: at for key, at in self._not_before.items() if at > now}
        chosen = backend_for(self._fleet, name, adapter.base, lambda each: (name, each.name) in self._not_before)
        if chosen is not None:
            command = asyncio.create_task(self._load(chosen, name, adapter), name="load_adapter")
            self._commands[name] = command
            command.add_done_callback(lambda _: self._commands.pop(name))

    async def _load(self, backend: Backend, name: str, adapter: LoraConfig) -> None:
        try:
            await self._client.command(backend.config, _PATH, {"lora_name": name, "lora_path": adapter.path})
        except ControlError as error:
            self._not_before[name, backend.name] = self._clock() + _AGAIN_SECONDS
            log.warning("adapter_load_failed", backend=backend.name, adapter=name, reason=str(error))
            return
        card = ModelCard(
            name, adapter.path, adapter.base, None, {"id": name, "object": "model", "parent": adapter.base}
        )
        if name not in backend.context_tokens:  # its list, read meanwhile, has it
            self._fleet.learned(backend, replace(backend.facts, models=(*backend.facts.models, card)))
        log.info("adapter_loaded", backend=backend.name, adapter=name)
