import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from gateway.config import HealthConfig, RoutingConfig
from gateway.core.backends.facts import Facts, KvEventSource, ModelCard
from gateway.core.backends.fleet import Fleet, Wanted
from gateway.core.backends.settings import BackendConfig
from gateway.core.feedback import CacheState
from gateway.core.request import Demand, InferenceRequest, Kind
from gateway.core.supervisor import Supervisor
from gateway.features.exact.mode import ExactMode
from gateway.features.exact.prompts import RESULTS
from gateway.features.models.settings import ModelConfig, ModelsConfig
from tests.unit.exact.publisher import Cache, Publisher

DEADLINE_SECONDS = 30.0
TOKENIZED = ModelsConfig(m=ModelConfig(tokenizer="folder"))

WITHOUT = """
import sys
import gateway.__main__
import gateway.process
from gateway.app import Gateway
from gateway.core.backends.facts import Facts, ModelCard
from gateway.config.file import parse

gateway = Gateway(parse({"backends": [{"url": "http://127.0.0.1:1"}]}), None)
fleet = gateway.core.fleet
for sources in (None, ()):
    fleet.learned(fleet.backends[0], Facts(models=(ModelCard("m"),), kv_event_sources=sources))
gateway.operators.overview.document()
room, face = "gateway.features.exact", ("endpoints", "feature", "index", "mode", "prompts")
found = {name for name in sys.modules if name.startswith(room)} - {room, *(f"{room}.{name}" for name in face)}
assert not found, found
assert "zmq" not in sys.modules
"""


def test_a_gateway_without_exact_mode_imports_nothing_that_runs_it() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


class Scene:
    """A backend that may publish KV events."""

    def __init__(self, models: ModelsConfig | None = None) -> None:
        config = BackendConfig(url="http://127.0.0.1:1", name="a")
        self.supervisor = Supervisor(time.monotonic)
        self.fleet = Fleet((config,), HealthConfig(), clock=time.monotonic, random=Random(1))
        self.cache_state = CacheState(RoutingConfig(), self.fleet, time.monotonic)
        models = models or ModelsConfig()
        self.exact = ExactMode(models, self.fleet, self.cache_state, clock=time.monotonic, supervisor=self.supervisor)
        self.fleet.on_facts.append(self.exact.facts_changed)
        self.fleet.on_restart.append(self.exact.restarted)
        self.fleet.on_leave.append(self.exact.left)
        self.published()

    def published(self, *publishers: Publisher) -> None:
        """The backend says that these publish its events."""
        sources = tuple(
            KvEventSource(rank, "zmq", publisher.endpoint, replay_endpoint=publisher.replay_endpoint, topic="kv@test")
            for rank, publisher in enumerate(publishers)
        )
        facts = Facts(models=(ModelCard("m"),), block_size_tokens=4, kv_event_sources=sources)
        self.fleet.learned(self.fleet.backends[0], facts)

    @property
    def is_used(self) -> bool:
        return self.exact._parts is not None

    async def hit(self, prompt: list[int]) -> int:
        """The predicted hit of a prompt of token ids."""
        request = InferenceRequest(
            "completions", Kind.GENERATE, b"POST", b"/x", Demand("m", prompt_size=400, prompt_tokens=90), "id", b"",
            document={"prompt": prompt},
        )  # fmt: skip
        demand = (await self.exact.prompts.complete(request)).demand
        assert demand.prompt_tokens == len(prompt)
        return self.cache_state.hit_predictor.predict(demand, self.fleet.engines())[0]

    async def until_used(self, count: int = 1) -> list[dict[str, Any]]:
        """The streams, once so many are used for placement."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(streams := self.exact.streams()) != count or not all(each["used"] for each in streams):
                await asyncio.sleep(0.01)
        return streams


@asynccontextmanager
async def running(models: ModelsConfig | None = None) -> AsyncIterator[Scene]:
    scene = Scene(models)
    async with scene.exact.running():
        yield scene
    assert scene.supervisor.faults == {}
    assert "kv-events" not in {thread.name for thread in threading.enumerate()}


async def test_engines_that_begin_to_publish_are_followed() -> None:
    prompt = list(range(100, 120))
    async with running() as scene:
        assert await scene.hit(prompt) == 0
        assert not scene.is_used, "the length of token ids is known without it"
        with Publisher() as publisher:
            publisher.publish(*Cache().serve(prompt))
            scene.published(publisher)
            [stream] = await scene.until_used()
            assert (stream["backend"], stream["state"], stream["whole"]) == ("a", "live", True)
            assert await scene.hit(prompt) == 16


async def test_engines_that_are_known_before_the_start_are_followed_from_it() -> None:
    with Publisher() as publisher:
        scene = Scene()
        scene.published(publisher)
        assert scene.is_used
        assert scene.exact.streams() == []
        async with scene.exact.running():
            await scene.until_used()


async def test_engines_that_publish_no_more_or_leave_are_not_followed() -> None:
    with Publisher() as publisher:
        for leave in (False, True):
            async with running() as scene:
                scene.published(publisher)
                await scene.until_used()
                if leave:
                    scene.fleet.reconcile({"b": Wanted(BackendConfig(url="http://127.0.0.1:2", name="b"))})
                    scene.fleet.let_go()
                else:
                    scene.published()
                await scene.until_used(0)


@pytest.mark.parametrize("reload", [False, True])
async def test_a_tokenizer_needs_it_from_the_start_or_from_a_reload_on(reload: bool) -> None:
    scene = Scene(None if reload else TOKENIZED)
    assert (scene.is_used, scene.exact.configured("m")) == (not reload, not reload)
    scene.exact.apply(TOKENIZED)
    assert scene.exact.configured("m")
    assert scene.exact.tokenized != ()
    assert "m" not in scene.exact.tokenized, "no backend is verified yet"
    assert await scene.exact.count("m", ["text"], 4, special=True) == "unverified"
    assert not scene.exact.counts_alike("m", "a")
    scene.exact.apply(ModelsConfig())
    assert not scene.exact.configured("m")
    assert scene.exact.tokenized == ()


async def test_what_happens_to_the_fleet_is_of_no_interest_before_it_is_used() -> None:
    async with running() as scene:
        [backend] = scene.fleet.backends
        scene.exact.fleet_changed()
        scene.exact.restarted(backend)
        scene.exact.left(backend)
        assert (scene.exact.streams(), scene.exact.verdicts("a"), scene.exact.tokenized) == ([], {}, ())
        assert scene.exact.tokenized_prompts() == dict.fromkeys(RESULTS, 0)
        assert not scene.exact.prompts.covers(0)
        assert not scene.is_used
