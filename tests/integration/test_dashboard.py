"""The dashboard of a running gateway, in a real browser: live requests, decisions, the playground, a dead engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from loadtest.servers.server import Server
from tests.browser import Page, browser_page, needs_browser
from tests.integration.conftest import StartGateway
from tests.integration.fleet import CHAT_MODEL, Fleet
from tests.integration.gateway_process import Gateway, config_for, running_gateway

pytestmark = [needs_browser, pytest.mark.timeout(180)]
OVERFLOWS = "[...document.querySelectorAll('.card')].filter((one) => one.scrollWidth > one.clientWidth).length"
ROWS = "document.querySelectorAll('#tape tbody tr.open')"


async def ask(gateway: Gateway, text: str, tokens: int = 5, request_id: str = "") -> None:
    headers = {"X-Request-ID": request_id} if request_id else {}
    async with gateway.client(default_headers=headers) as client:
        await client.chat.completions.create(
            model=CHAT_MODEL, messages=[{"role": "user", "content": text}], max_tokens=tokens
        )


@asynccontextmanager
async def holding_every_engine(gateway: Gateway, fleet: Fleet) -> AsyncIterator[None]:
    """A stream on each chat engine, until the block ends."""
    async with gateway.client() as client, AsyncExitStack() as stack:
        for _ in fleet.chat_names:
            stream = await client.chat.completions.create(
                model=CHAT_MODEL,
                messages=[{"role": "user", "content": "Count."}],
                max_tokens=5000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            await stack.enter_async_context(stream)
        yield


async def watched(page: Page, gateway: Gateway, view: str) -> None:
    """Open the page, and wait until it is live with all backends up."""
    await page.open(f"{gateway.admin_url}/#{view}")
    await page.until("document.querySelector('#connection').className === 'live'")


async def test_a_request_is_shown_with_its_placement(gateway: Gateway, fleet: Fleet, tmp_path: Path) -> None:
    async with browser_page(tmp_path) as page:
        await watched(page, gateway, "requests")
        await ask(gateway, "What is a gateway? " * 50, request_id="watched-1")
        await page.until("document.querySelector('[data-id=watched-1]')")
        await page.click("[data-id=watched-1]")
        await page.until("document.querySelector('tr.detail').innerText.includes('When it arrived')")
        detail = await page.text("tr.detail")
        assert all(name in detail for name in fleet.chat_names)
        assert "own prefill" in detail
        await page.resize(390, 844, is_phone=True)
        await page.until("tape.offsetWidth <= tape.parentElement.clientWidth")
        assert await page.run(OVERFLOWS) == 0
        assert "What is a gateway" not in await page.run("document.documentElement.outerHTML")
        assert page.complaints == []


async def test_requests_that_wait_are_shown_and_then_what_bound_them(
    start_gateway: StartGateway, fleet: Fleet, tmp_path: Path
) -> None:
    with start_gateway(max_in_flight=1) as gateway:
        async with browser_page(tmp_path) as page:
            await watched(page, gateway, "queue")
            await page.until("document.querySelector('nav a[data-view=fleet] b').innerText === '3'")
            async with holding_every_engine(gateway, fleet):
                asked = [asyncio.create_task(ask(gateway, f"Count to {number}.")) for number in range(6)]
                await page.until("document.body.innerText.includes('1 of 1 slots taken')")
            await asyncio.gather(*asked)
            await page.run("location.hash = 'requests'")
            await page.until(f"{ROWS}.length === 8")
            await page.run(f"{ROWS}[0].click()")
            await page.until("document.querySelector('tr.detail').innerText.includes('When it was bound')")
            assert page.complaints == []


async def test_the_playground_sends_as_a_client_does(fleet: Fleet, tmp_path: Path) -> None:
    keys = {"auth": {"keys": [{"name": "team-a", "key": "sk-playground"}]}}
    with running_gateway(tmp_path, config_for(fleet, keys, {})) as gateway:
        async with browser_page(tmp_path) as page:
            await watched(page, gateway, "playground")
            await page.until("document.querySelector('#body').value.includes('messages')")
            await page.run(f"model.value = '{CHAT_MODEL}'; model.dispatchEvent(new Event('change'))")
            await page.click("#send")
            await page.until("note.innerText.startsWith('401')")  # it is no way around the keys
            await page.type("#key", "sk-playground")
            await page.click("#send")
            await page.until("note.innerText.startsWith('200 in') && answer.innerText.length > 20")
            assert "first text after" in await page.text("#note")
            await page.until("document.body.innerText.includes('Its placement')")
            assert "sk-playground" not in await page.text("#curl")
            assert f"{gateway.url}/v1/chat/completions" in await page.text("#curl")
            await page.click("#dry")
            await page.until("document.body.innerText.includes('Where it would go now')")


@pytest.mark.simulated("a real engine takes long to start, and ends in the same way")
async def test_a_dead_engine_is_shown_as_such(fleet: Fleet, spare: Server, tmp_path: Path) -> None:
    config = config_for(fleet, {"health": {"probe_interval_seconds": 0.2}}, {})
    config["backends"].append({"url": spare.url, "name": "spare"})
    with running_gateway(tmp_path, config) as gateway:
        async with browser_page(tmp_path) as page:
            await watched(page, gateway, "fleet")
            await page.until("document.querySelector('[data-engine=spare]').className === 'engine up'")
            await asyncio.to_thread(spare.stop)
            await page.until("document.querySelector('[data-engine=spare]').className === 'engine down'")
            await page.until("document.title === '(1) Gateway'")
            await page.run("location.hash = 'timeline'")
            await page.until("document.querySelector('.lanes').innerHTML.includes('spare')")
            assert "refused" in await page.text("main")
            assert page.complaints == []
