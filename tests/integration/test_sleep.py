"""An idle engine is put to sleep, and woken by the requests that wait for it."""

from pathlib import Path
from typing import Any

import aiohttp
import orjson

from loadtest.servers.server import get
from tests.integration.fleet import CHAT_FLAGS, CHAT_MODEL, simulated_engine
from tests.integration.gateway_process import running_gateway
from tests.integration.observed import eventually
from tests.integration.prompts import fresh
from tests.integration.test_other_endpoints import post


async def backends_of(admin_url: str) -> Any:
    """The first backend, as /admin/backends shows it."""
    return orjson.loads(get(f"{admin_url}/admin/backends", 5.0))["backends"][0]


async def post_nothing(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(url) as answer:
        assert answer.status == 200


QUICK = {"health": {"probe_interval_seconds": 0.2}}


async def test_an_idle_engine_sleeps_until_a_request_comes(tmp_path: Path) -> None:
    with simulated_engine(tmp_path, *CHAT_FLAGS, "--dev-mode") as engine:
        backend = {"url": engine.url, "sleep": {"idle_seconds": 1}}
        with running_gateway(tmp_path, {"backends": [backend], **QUICK}) as gateway:

            async def sleeps() -> bool:
                return b'"is_sleeping":true' in get(f"{engine.url}/is_sleeping", 5.0).replace(b" ", b"")

            for _ in range(2):
                await eventually(sleeps, "the engine sleeps")
                shown: Any = await backends_of(gateway.admin_url)
                assert shown["state_reason"] == "asleep (weights_offloaded), woken for requests"
                async with gateway.client() as client:
                    messages: Any = [{"role": "user", "content": fresh()}]
                    answer = await client.chat.completions.create(model=CHAT_MODEL, messages=messages, max_tokens=4)
                assert answer.choices[0].message.content
            get(f"{gateway.url}/readyz", 5.0)


async def test_an_engine_that_others_put_to_sleep_gets_no_requests(tmp_path: Path) -> None:
    with (
        simulated_engine(tmp_path, *CHAT_FLAGS, "--dev-mode") as one,
        simulated_engine(tmp_path, *CHAT_FLAGS) as other,
        running_gateway(tmp_path, {"backends": [{"url": one.url}, {"url": other.url}], **QUICK}) as gateway,
    ):
        await post_nothing(f"{one.url}/sleep")

        async def is_known() -> bool:
            return (await backends_of(gateway.admin_url))["state_reason"] == "asleep (weights_offloaded)"

        await eventually(is_known, "the gateway knows that it sleeps")
        body = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": fresh()}], "max_tokens": 2}
        for _ in range(6):
            await post(gateway.url, "/v1/chat/completions", body)
