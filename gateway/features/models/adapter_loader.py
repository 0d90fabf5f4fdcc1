"""Loads the configured LoRA adapters when requests wait for them.

One backend at a time: the first when a request comes for an adapter that none has, another one while requests still
wait. vLLM needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for this; a backend that refuses is tried again after a while.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import ModelCard
from gateway.core.backends.fleet import Clock, Fleet
from gateway.core.backends.vllm_api import ControlError
from gateway.core.supervisor import Supervisor
from gateway.features.models.commands import Commands
from gateway.features.models.settings import LoraConfig

_PATH = "/v1/load_lora_adapter"

log = structlog.get_logger()


def backend_for(fleet: Fleet, name: str, base: str, refused: Callable[[Backend], bool]) -> Backend | None:
    """The backend of the base model that should load an adapter: with the fewest requests in flight."""
    able = [each for each in fleet.serving(base) or () if name not in each.context_tokens and not refused(each)]
    return min(able, key=lambda each: each.in_flight, default=None)


class AdapterLoader:
    """Loads adapters inside the `async with` block of `commands`. `waiting` counts the requests for a model."""

    def __init__(self, fleet: Fleet, waiting: Callable[[str], int], clock: Clock, *, supervisor: Supervisor) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._adapters: Mapping[str, LoraConfig] = {}
        self.commands = Commands("adapters", self._look_at_all, clock, supervisor=supervisor)  # one for each adapter

    def apply(self, adapters: Mapping[str, LoraConfig]) -> None:
        """Take over other adapters. Those that are loaded stay loaded."""
        self._adapters = adapters
        self._fleet.expect_adapters({name: adapter.base for name, adapter in adapters.items()})

    def _look_at_all(self) -> None:
        for name, adapter in self._adapters.items():
            if name not in self.commands and self._waiting(name):
                self._look(name, adapter)

    def _look(self, name: str, adapter: LoraConfig) -> None:
        commands = self.commands
        chosen = backend_for(self._fleet, name, adapter.base, lambda each: not commands.may_run((name, each.name)))
        if chosen is not None:
            commands.start(name, self._load(chosen, name, adapter))

    async def _load(self, backend: Backend, name: str, adapter: LoraConfig) -> None:
        try:
            await self.commands.send(backend, _PATH, {"lora_name": name, "lora_path": adapter.path})
        except ControlError as error:
            self.commands.failed((name, backend.name))
            log.warning("adapter_load_failed", backend=backend.name, adapter=name, reason=str(error))
            return
        card = ModelCard(
            name,
            adapter.path,
            adapter.base,
            max_model_len=None,
            raw={"id": name, "object": "model", "parent": adapter.base},
        )
        if name not in backend.context_tokens:  # its list, read meanwhile, has it
            self._fleet.learned(backend, replace(backend.facts, models=(*backend.facts.models, card)))
        log.info("adapter_loaded", backend=backend.name, adapter=name)
