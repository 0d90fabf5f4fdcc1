"""Makes the pictures of docs/dashboard.md: simulated engines, some load, and a real browser.

python -m tools.pictures
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from loadtest.servers.server import Server
from tests.browser import Page, browser_page
from tests.integration.fleet import simulated_engine
from tests.integration.gateway_process import Gateway, running_gateway

FOLDER = Path(__file__).resolve().parents[1] / "docs/img"
MODEL = "qwen3-32b"
ENGINES, USERS, SLOTS = 6, 90, 10
_TENANTS = (("search", 4), ("support", 2), ("agents", 2), ("nightly", 1))
_SUBJECTS = ("invoices", "returns", "contracts", "search results", "tickets")


def question(random: Random, number: int) -> dict[str, Any]:
    """A request of one of a few applications, each with a system prompt of its own."""
    subject = random.choice(_SUBJECTS)
    system = f"You answer questions about {subject}. Be brief, and name your sources. " * 40
    user = f"Question {number}: what is new about {subject} since yesterday?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": MODEL, "stream": True, "max_tokens": random.choice((20, 60, 150)), "messages": messages}


async def ask(session: aiohttp.ClientSession, url: str, random: Random, number: int) -> None:
    names, weights = zip(*_TENANTS, strict=True)
    [tenant] = random.choices(names, weights)
    headers = {"x-tenant": tenant} | ({"x-gateway-priority": "batch"} if tenant == "nightly" else {})
    body = question(random, number)
    if number % 97 == 5:
        body["model"] = "qwen3-23b"
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.read()


async def load(gateway: Gateway, stop: asyncio.Event) -> None:
    """Closed-loop users, until told to stop."""
    random, connector = Random(1), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def user(number: int) -> None:
            while not stop.is_set():
                number += 1000
                with suppress(aiohttp.ClientError):  # one engine dies
                    await ask(session, gateway.url, random, number)
                await asyncio.sleep(random.random() * 0.3)

        await asyncio.gather(*map(user, range(USERS)))


async def look(page: Page, view: str, name: str) -> None:
    await page.run(f"location.hash = '{view}'")
    await page.until(f"document.documentElement.dataset.view === '{view}'")
    await asyncio.sleep(2.5)
    await page.screenshot(FOLDER / f"dashboard-{name}.png")


async def take(page: Page, gateway: Gateway, broken: Server) -> None:
    """All pictures; `broken`: the engine that dies on the way."""
    await page.resize(1360, 860)
    await page.open(gateway.admin_url)
    await page.until("document.querySelector('#connection').className === 'live'")
    await asyncio.sleep(25)
    await asyncio.to_thread(broken.stop)
    await asyncio.sleep(6)
    await look(page, "fleet", "fleet")
    await look(page, "timeline", "errors")
    await page.run("location.hash = 'saved'")
    await page.until("document.body.innerText.includes('What keeps caches cold')")
    await look(page, "saved", "saved")
    await page.run("location.hash = 'requests'")
    await asyncio.sleep(1.5)
    await page.click("#tape tbody tr.open:nth-child(4)")
    await asyncio.sleep(1)
    await page.screenshot(FOLDER / "dashboard-requests.png")
    await page.prefer("dark")
    await look(page, "queue", "queue")
    await page.resize(390, 844, is_phone=True)
    await look(page, "fleet", "phone")


async def main() -> None:
    """Start everything, take the pictures, stop everything."""
    folder, stop = Path(tempfile.mkdtemp()), asyncio.Event()
    flags = ("--model", MODEL, "--max-num-seqs", "16", "--kv-tokens", "24000", "--max-model-len", "8192")
    with ExitStack() as stack:
        engines = [stack.enter_context(simulated_engine(folder, *flags)) for _ in range(ENGINES)]
        backends = [{"url": each.url, "name": f"gpu-{at}", "max_in_flight": SLOTS} for at, each in enumerate(engines)]
        sections = {"admission": {"tenant_header": "x-tenant"}, "health": {"probe_interval_seconds": 1.0}}
        gateway = stack.enter_context(running_gateway(folder, {"backends": backends, **sections}))
        loading = asyncio.create_task(load(gateway, stop))
        async with browser_page(folder) as page:
            await take(page, gateway, engines[4])
            print(page.complaints)  # noqa: T201
        stop.set()
        await loading


if __name__ == "__main__":
    asyncio.run(main())
