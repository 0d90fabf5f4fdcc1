"""KV events that do not arrive: requests go on, hits are taken from the own record, and are exact again afterwards."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import eventually, read
from tests.integration.predictions import BLOCK_TOKENS, Answered, complete, hit_share
from tests.integration.publishing import (
    SimOptions,
    Simulated,
    followed,
    get,
    hit_becomes,
    in_front_of,
    post,
    sent_past_the_gateway,
    simulated_engines,
    streams,
)

pytestmark = pytest.mark.simulated("only these can be told to lose their events")
BLOCKS = 8  # of each prompt


@dataclass(frozen=True)
class Scene:
    """One engine, a gateway that follows its events, and a client of that."""

    engine: Simulated
    gateway: Gateway
    sdk: AsyncOpenAI
    random: Random

    def prompts(self, count: int) -> list[list[int]]:
        """New ones of eight blocks and a bit."""
        return [self.random.choices(range(100, 400), k=BLOCKS * BLOCK_TOKENS + 9) for _ in range(count)]

    async def ask(self, prompts: Sequence[list[int]]) -> list[Answered]:
        """Each in turn. A request that fails raises."""
        return [await complete(self.sdk, prompt) for prompt in prompts]

    async def stream(self) -> dict[str, Any]:
        """How the engine's events are followed."""
        return (await streams(self.gateway))[self.engine.name]

    async def is_exact(self) -> None:
        """The gateway knows of a prompt that it did not send."""
        await followed(self.gateway, 1)
        [prompt] = self.prompts(1)
        await sent_past_the_gateway(self.engine, prompt)
        await hit_becomes(self.gateway, self.engine, prompt, BLOCKS * BLOCK_TOKENS)
        [answer] = await self.ask([prompt])
        assert answer.predicted == answer.cached == BLOCKS * BLOCK_TOKENS

    async def knows_what_it_sent(self, prompts: Sequence[list[int]]) -> None:
        """Sent once more, they are found in the cache, as predicted."""
        answers = await self.ask(prompts)
        assert all(answer.is_right for answer in answers), answers
        assert hit_share(answers) > 0.8


@asynccontextmanager
async def scene(folder: Path, options: SimOptions, **events: str) -> AsyncIterator[Scene]:
    """Its engine has room for all that a test sends; `events` takes the place of its addresses."""
    with simulated_engines(folder, options) as [engine]:
        config = in_front_of([engine])
        if events:
            config["backends"][0]["kv_events"] = engine.events | events
        with running_gateway(folder, config) as gateway:
            await followed(gateway, 1)
            async with gateway.client() as sdk:
                yield Scene(engine, gateway, sdk, Random(41))


async def is_not_followed(gateway: Gateway) -> bool:
    return await read(gateway.admin_url, "gateway_kv_events_followed") == 0


async def test_a_gap_is_repaired(tmp_path: Path) -> None:
    async with scene(tmp_path, SimOptions(cache_blocks=400)) as here:
        prompts = here.prompts(6)
        await here.ask(prompts[:2])
        await here.engine.faults(kv_events_drop_batches=3)
        await here.ask(prompts[2:])

        async def repaired() -> bool:
            return bool((await here.stream())["repairs"] >= 2)  # the first contact is one

        await eventually(repaired, "the missing events are had")
        await here.knows_what_it_sent(prompts)
        await here.is_exact()
        stream = await here.stream()
        assert (stream["gaps"], stream["lost_views"], stream["restarts"]) == (1, 0, 0)
        assert await read(here.gateway.admin_url, "gateway_kv_events_gaps_total") == 1


async def test_after_a_gap_beyond_repair_the_own_record_is_used_until_the_view_is_whole(tmp_path: Path) -> None:
    options = SimOptions(cache_blocks=400, flags=("--kv-events-buffer-steps", "1"))
    async with scene(tmp_path, options) as here:
        prompts = here.prompts(6)
        await here.ask(prompts[:2])
        await here.engine.faults(kv_events_drop_batches=3)
        await here.ask(prompts[2:])

        async def has_lost() -> bool:
            stream = await here.stream()
            return (stream["state"], stream["lost_views"]) == ("live", 1)

        await eventually(has_lost, "the view is lost")
        stream = await here.stream()
        assert (stream["whole"], stream["used"], stream["restarts"]) == (False, False, 0)
        await eventually(lambda: is_not_followed(here.gateway), "the metrics show it")
        [shown] = (await get(f"{here.gateway.admin_url}/admin/backends"))["backends"]
        assert shown["prefix_record_bytes"] >= 6 * BLOCKS * BLOCK_TOKENS * 4
        await here.knows_what_it_sent(prompts)
        await post(f"{here.engine.url}/reset_prefix_cache")
        await sent_past_the_gateway(here.engine, here.prompts(1)[0])  # a reset is told with the next step
        await here.is_exact()
        assert [(answer.predicted, answer.cached) for answer in await here.ask(prompts)] == [(0, 0)] * 6
        await here.knows_what_it_sent(prompts)


async def test_an_engine_that_ceases_to_tell_is_noticed_by_its_answers(tmp_path: Path) -> None:
    async with scene(tmp_path, SimOptions(cache_blocks=800)) as here:
        prompts = here.prompts(4)
        await here.ask(prompts[:2])
        await here.engine.faults(kv_events_hang=True)
        await here.ask(prompts[2:])

        async def has_noticed() -> bool:
            await here.ask(here.prompts(1))
            await asyncio.sleep(0.2)  # few enough that the cache holds them all
            return await is_not_followed(here.gateway)

        await eventually(has_noticed, "the silence is noticed", 10.0)
        stream = await here.stream()
        assert (stream["state"], stream["used"]) == ("live", False)
        await here.knows_what_it_sent(prompts)
        await here.engine.faults()
        await here.is_exact()
        await here.knows_what_it_sent(prompts)


class Passage:
    """A port that leads to another one while it is open."""

    def __init__(self, far_port: int) -> None:
        self._far_port = far_port
        self._port = 0
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> str:
        """Gives the endpoint, which stays the same."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return f"tcp://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """Cut what passes, and refuse what comes."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        await self._server.wait_closed()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._far_port)
        self._writers += [writer, far_writer]
        with suppress(ConnectionError):
            await asyncio.gather(_pumped(reader, far_writer), _pumped(far_reader, writer))


async def _pumped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
    writer.close()


async def test_while_the_connection_is_cut_the_own_record_is_used(tmp_path: Path) -> None:
    options = SimOptions(cache_blocks=400)
    passage = Passage(options.ports[0])
    async with scene(tmp_path, options, endpoint=await passage.open()) as here:
        prompts = here.prompts(6)
        await here.ask(prompts[:3])

        async def all_told() -> bool:
            return bool((await here.stream())["messages"] >= 3)

        await eventually(all_told, "the events of all prompts have come")
        await passage.close()
        await eventually(lambda: is_not_followed(here.gateway), "the connection is missed")
        stream = await here.stream()
        assert (stream["state"], stream["used"]) == ("lost", False)
        await here.ask(prompts[3:])
        await here.knows_what_it_sent(prompts)
        [foreign] = here.prompts(1)
        await sent_past_the_gateway(here.engine, foreign)
        await passage.open()
        await followed(here.gateway, 1)
        await hit_becomes(here.gateway, here.engine, foreign, BLOCKS * BLOCK_TOKENS)
        await here.knows_what_it_sent(prompts)
        await here.is_exact()
        stream = await here.stream()
        assert (stream["lost_views"], stream["restarts"]) == (0, 0)
        await passage.close()
