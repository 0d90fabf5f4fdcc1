"""Queries backends once, outside of the serving path: for `gateway check` and `gateway plan`."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from gateway.backends import vllm_api
from gateway.backends.backend import Backend
from gateway.backends.facts import Facts
from gateway.backends.health import PROBE_WORDS, ProbeResult
from gateway.backends.probe import SERVER_INFO_TIMEOUT_SECONDS
from gateway.backends.vllm_api import ControlClient, ControlError
from gateway.backends.vllm_metrics import with_scrape
from gateway.config import Config


@dataclass
class Answers:
    """What one backend answered; `problems` maps a path to its error."""

    backend: Backend
    probe: ProbeResult = ProbeResult.OK
    facts: Facts = field(default_factory=Facts)
    is_vllm: bool = False
    probe_error: str = ""
    problems: dict[str, ControlError] = field(default_factory=dict)

    @property
    def is_reachable(self) -> bool:
        return self.probe not in (ProbeResult.TIMEOUT, ProbeResult.REFUSED)

    @property
    def why_not_used(self) -> str:
        """The reason why a backend whose probe failed gets no requests."""
        return self.probe_error or PROBE_WORDS[self.probe]

    async def query(self, client: ControlClient) -> None:
        errors: list[str] = []
        self.probe = await client.probe(self.backend, errors.append)
        self.probe_error = "".join(errors)
        if self.is_reachable:
            await asyncio.gather(
                self._learn(client, vllm_api.MODELS_PATH, vllm_api.with_models),
                self._learn(client, vllm_api.VERSION_PATH, vllm_api.with_version),
                self._learn(client, vllm_api.KV_EVENT_SOURCES_PATH, vllm_api.with_kv_event_sources),
                self._learn(client, vllm_api.SERVER_INFO_PATH, vllm_api.with_server_info, SERVER_INFO_TIMEOUT_SECONDS),
                self._scrape(client),
            )
            self.backend.learn(self.facts)

    async def _learn(
        self, client: ControlClient, path: str, take: Callable[[Facts, Any], Facts], timeout: float | None = None
    ) -> None:
        try:
            document = await client.ask(self.backend, path, timeout)
            self.facts = take(self.facts, document)
        except ControlError as error:
            self.problems[path] = error
        except ValueError as error:
            self.problems[path] = ControlError(f"{path}: {error}")

    async def _scrape(self, client: ControlClient) -> None:
        try:
            scrape = await client.scrape(self.backend)
        except ControlError as error:
            self.problems["/metrics"] = error
            return
        self.is_vllm = scrape.telemetry is not None
        self.facts = with_scrape(self.facts, scrape)


async def survey(config: Config) -> list[Answers]:
    """The answers of all backends, queried at the same time."""
    found = [Answers(Backend(index, each, config.health, Random(0))) for index, each in enumerate(config.backends)]
    async with ControlClient(config.health.probe_timeout_seconds, time.monotonic) as client:
        await asyncio.gather(*(answers.query(client) for answers in found))
    return found
