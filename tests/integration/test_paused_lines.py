"""Lines of a batch that clients interrupt again and again have the answers that the engine gives to whole requests."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtest.servers.server import Server
from tests.integration.conftest import engine_kind
from tests.integration.fleet import CHAT_MODEL, simulated_engine, spare_engine
from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import read
from tests.integration.prompts import chat
from tests.integration.test_batches import CHAT, ended, lines_of, submit

COMPLETIONS = "/v1/completions"
SLOTS = 2
TOKENS = 160
PROMPTS = ("Hello.", "Tell a long story 🙂 of 漢字.", "Zwölf Boxkämpfer jagen Viktor", "def read(self):", "1, 2, 3, 4,")
SLOW = ("--preset", "cpu-tiny", "--time-scale", "3")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine whose answers take a while."""
    folder, kind = tmp_path_factory.mktemp("engine"), engine_kind(request.config)
    start = simulated_engine(folder, "--model", CHAT_MODEL, *SLOW) if kind == "sim" else spare_engine(kind, folder)
    with start as running:
        yield running


@pytest.fixture
def gateway(engine: Server, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway whose slots the lines fill."""
    backends = [{"url": engine.url, "max_in_flight": SLOTS}]
    admission = {"itl_objective_seconds": 100}
    batches = {"path": str(tmp_path / "batches")}
    with running_gateway(tmp_path, {"backends": backends, "admission": admission, "batches": batches}) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def whole(http: aiohttp.ClientSession, engine: Server, line: dict[str, Any]) -> dict[str, Any]:
    """The engine's own answer."""
    async with http.post(engine.url + line["url"], json=line["body"]) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def interrupted(
    gateway: Gateway, endpoint: str, lines: list[dict[str, Any]], every_seconds: float
) -> dict[str, Any]:
    """The bodies of a batch's answers, whose slots clients take again and again."""
    async with gateway.client("none") as sdk:
        running = asyncio.create_task(ended(sdk, await submit(sdk, lines, endpoint)))
        while not running.done():
            ask = chat(tokens=2)
            await asyncio.gather(*[sdk.chat.completions.create(**ask) for _ in range(SLOTS)])
            await asyncio.wait([running], timeout=every_seconds)
        batch = await running
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (len(lines), 0)
        found = await lines_of(sdk, batch.output_file_id)
    return {name: line["response"]["body"] for name, line in found.items()}


def without_cache(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
async def test_interrupted_lines_have_the_same_answers(
    gateway: Gateway, engine: Server, http: aiohttp.ClientSession, endpoint: str
) -> None:
    lines = []
    for number, text in enumerate(PROMPTS):
        prompt = {"messages": [{"role": "user", "content": text}]} if endpoint == CHAT else {"prompt": text}
        limit = {"max_tokens": TOKENS + 7 * number, "temperature": 0, "ignore_eos": number % 2 == 0}
        body = {"model": CHAT_MODEL, **prompt, **limit}
        lines.append({"custom_id": str(number), "method": "POST", "url": endpoint, "body": body})
    started = time.monotonic()
    expected = {line["custom_id"]: await whole(http, engine, line) for line in lines}
    each_seconds = (time.monotonic() - started) / len(lines)
    answers = await interrupted(gateway, endpoint, lines, each_seconds / 4)
    for name, answer in answers.items():
        unbroken = expected[name]
        assert answer["choices"][0] | unbroken["choices"][0] == unbroken["choices"][0]
        assert without_cache(answer["usage"]) == without_cache(unbroken["usage"])
        assert set(answer) <= set(unbroken)
        assert (answer["object"], answer["model"]) == (unbroken["object"], unbroken["model"])
    if not await read(gateway.admin_url, "gateway_batch_lines_total", state="continued"):
        pytest.skip("no line was paused: slots were kept free for the clients in time")
