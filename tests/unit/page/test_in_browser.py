"""The dashboard in a real browser, of a gateway whose fleet, queue and requests the test makes."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.config import AdminConfig
from gateway.core.backends.health import ProbeResult
from gateway.features.operate.admin_http import OperatorPort
from gateway.features.page.routes import STATIC
from tests.browser import Page, browser_page, needs_browser
from tests.unit.insights.traffic import Prose, chat, read, send, times
from tests.unit.page.builders import House, record

pytestmark = [needs_browser, pytest.mark.timeout(180)]
HOSTILE = "<img src=x onerror=\"document.title='taken'\">'\"</script><script>document.title='taken'</script>"
VIEWS = ("fleet", "queue", "requests", "saved", "timeline", "gateway", "configuration", "playground")


OVERFLOWS = (
    "[...document.querySelectorAll('.card')].filter((one) => one.scrollWidth > one.clientWidth)"
    ".map((one) => one.innerText)"
)


# Points at the last moment of the first chart, which all charts follow, and then leaves it.
POINT = """(() => {
  const over = document.querySelector('.u-over'), box = over.getBoundingClientRect();
  const at = { bubbles: true, clientX: box.right - 1, clientY: box.top + 20, movementX: 5 };
  over.dispatchEvent(new MouseEvent('mouseenter', at)); over.dispatchEvent(new MouseEvent('mousemove', at));
})()"""
POINT_AWAY = "document.querySelector('.u-over').dispatchEvent(new MouseEvent('mouseleave', { bubbles: true }))"


def count(selector: str) -> str:
    """How many such elements there are, in the page's language."""
    return f"document.querySelectorAll('{selector}').length"


class Dashboard:
    """A page that watches a gateway. Time goes on by a second before each message."""

    def __init__(self, page: Page, house: House, url: str) -> None:
        self.page, self.house, self.url = page, house, url

    async def show(self, view: str, condition: str = "true") -> None:
        """Open a view, and wait until it has drawn that."""
        await self.page.run(f"location.hash = '{view}'")
        await self.page.until(f"document.documentElement.dataset.view === '{view}' && ({condition})")

    def finish(self, count: int, **what: Any) -> None:
        for number in range(count):
            self.house.gateway.core.finished.add(
                record(f"r{self.house.gateway.operators.recent.count}-{number}", **what)
            )


@asynccontextmanager
async def dashboard(house: House, folder: Path, token: str = "") -> AsyncIterator[Dashboard]:
    gateway = house.gateway
    port = OperatorPort("server.admin", AdminConfig(port=0, token=token), STATIC.keys())
    async with port.listening(gateway.operators.admin_routes()) as number, browser_page(folder) as page:
        url = f"http://127.0.0.1:{number}/"
        await page.open(url)
        if not token:
            await page.until("document.documentElement.dataset.time")
        try:
            yield Dashboard(page, house, url)
        finally:
            gateway.operators.dashboard.stop()


def busy_house(backends: int = 3, models: tuple[str, ...] = ("m",)) -> House:
    house = House(backends, models)
    house.place(4 * backends)
    house.place(5, tenant="team-a")
    house.place(2, tenant="team-b", batch=True)
    return house


async def test_every_view_is_drawn_and_the_browser_complains_of_nothing(tmp_path: Path) -> None:
    async with dashboard(busy_house(), tmp_path) as shown:
        shown.finish(20, backend="gpu-1", client="team-a")
        shown.finish(2, outcome="queue_full", error="The queue is full.")
        expected = {
            "fleet": f"{count('.engine.up')} === 3 && {count('canvas')} === 3",
            "queue": "document.body.innerText.includes('4 of 4 slots taken')",
            "requests": "document.querySelectorAll('#tape tbody tr').length === 22",
            "saved": "document.body.innerText.includes('By prefix family')",
            "timeline": "document.querySelectorAll('.lanes circle').length >= 5",
            "gateway": "document.querySelectorAll('canvas').length === 4",
            "configuration": "document.body.innerText.includes('prefix_report:')",
            "playground": "document.body.innerText.includes('curl -N')",
        }
        assert tuple(expected) == VIEWS
        for view, condition in expected.items():
            await shown.show(view, condition)
            assert await shown.page.run("document.querySelector('nav a[aria-current]').dataset.view") == view
        assert shown.page.complaints == []


async def test_saved_work_names_prefixes_applications_and_what_keeps_caches_cold(tmp_path: Path) -> None:
    random, house = Random(4), House(2)
    prose, clock = Prose(random), times(random)
    system = prose.text(6000)
    requests = [read(chat(f"Now: {next(clock)}\n{system}", prose.text(200))) for _ in range(30)]
    send(house.gateway.features["insights"].report, requests, client=lambda _: HOSTILE)
    async with dashboard(house, tmp_path) as shown:
        await shown.show("saved", "document.body.innerText.includes('timestamp in messages[0] (system)')")
        text = await shown.page.text()
        assert "Move the time behind the shared text" in text
        assert "tokens an hour would be saved" in text
        assert "Without prefix caches, the engines would have computed all prompt tokens" in text
        assert "seen before, but after a difference" in text
        assert "onerror" in text  # the key of an application
        assert system[100:140] not in text  # show_text is off
        assert shown.page.complaints == []


async def test_what_is_shown_follows_the_gateway(tmp_path: Path) -> None:
    house = House(2)
    async with dashboard(house, tmp_path) as shown:
        await shown.show("fleet", "document.querySelectorAll('.engine.up').length === 2")
        house.place(3)
        house.now += 1
        await shown.page.until(
            "[...document.querySelectorAll('.engine dd')].some((one) => one.innerText === '2 / 4 / 4')"
        )
        for _ in range(5):
            house.gateway.core.fleet.probed(
                house.gateway.core.fleet.backends[0], ProbeResult.REFUSED, "connection refused"
            )
        await shown.page.until("document.querySelector('[data-engine=gpu-0]').className === 'engine down'")
        assert "connection refused" in await shown.page.text("[data-engine=gpu-0]")
        await shown.page.until("document.title === '(1) Gateway'")
        await shown.show("timeline", "document.querySelector('.lanes circle.bad')")
        await shown.show("requests")
        shown.finish(1, backend="gpu-1")
        await shown.page.until("document.querySelectorAll('#tape tbody tr').length === 1")
        assert "gpu-1" in await shown.page.text("#tape tbody")
        assert shown.page.complaints == []


async def test_what_clients_choose_is_text_and_nothing_else(tmp_path: Path) -> None:
    house = busy_house(1, (HOSTILE, "m"))
    house.place(3, tenant=HOSTILE, model=HOSTILE)
    async with dashboard(house, tmp_path) as shown:
        shown.finish(3, model=HOSTILE, client=HOSTILE, backend=HOSTILE)
        shown.finish(3, outcome=HOSTILE, error=HOSTILE, client=HOSTILE)
        for view in VIEWS:
            await shown.show(view)
            if view in ("fleet", "queue", "requests", "timeline"):
                await shown.page.until("document.querySelector('main').innerText.includes('onerror')")
        assert await shown.page.run("document.title") == "Gateway"
        assert await shown.page.run("document.querySelectorAll('img, main script, iframe, object').length") == 0
        assert shown.page.complaints == []


async def test_a_large_fleet_and_many_requests_stay_bounded(tmp_path: Path) -> None:
    house = busy_house(64)
    async with dashboard(house, tmp_path) as shown:
        await shown.show("fleet", "document.querySelectorAll('.engine.up').length === 64")
        assert await shown.page.run("document.querySelector('.engines').classList.contains('compact')")
        await shown.show("requests")
        for _ in range(10):
            shown.finish(1000, backend="gpu-7")
            house.now += 1
            seen = await shown.page.run("document.documentElement.dataset.time")
            await shown.page.until(f"document.documentElement.dataset.time !== '{seen}'")
        await shown.page.until("document.querySelectorAll('#tape tbody tr').length === 200")
        assert await shown.page.run("document.querySelectorAll('*').length") < 4000
        await shown.page.type("#search", "r9-")
        await shown.page.until("document.querySelectorAll('#tape tbody tr').length < 200")
        await shown.show("fleet", "document.querySelectorAll('.engine.up').length === 64")
        assert await shown.page.run("document.querySelectorAll('*').length") < 4000
        assert shown.page.complaints == []


async def test_a_click_on_a_request_shows_what_each_engine_would_have_cost(tmp_path: Path) -> None:
    async with dashboard(House(2), tmp_path) as shown:
        await shown.show("requests")
        shown.finish(1)
        await shown.page.until("document.querySelector('#tape tbody tr.open')")
        await shown.page.click("#tape tbody tr.open")
        await shown.page.until("document.querySelector('tr.detail').innerText.includes('No decision was recorded')")
        assert await shown.page.run("document.querySelector('#hold').checked")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_needs_no_sideways_scrolling(tmp_path: Path, scheme: str) -> None:
    async with dashboard(busy_house(3), tmp_path) as shown:
        await shown.page.prefer(scheme)
        await shown.page.resize(390, 844, is_phone=True)
        shown.finish(20, backend="gpu-1", model="a-model-with-a-long-name-" * 4)
        shown.finish(20, outcome="queue_full", error="The queue is full: try again. " * 5)
        shown.finish(1, outcome="deadline_exceeded_with_a_long_name")
        shown.finish(1, attempts=12)
        for view in VIEWS:
            await shown.show(view)
            width = await shown.page.run("document.documentElement.scrollWidth")
            assert width <= 390, view
        for view in ("queue", "requests", "timeline"):
            await shown.show(view, f"{count('main tbody tr')} > 0")
            assert await shown.page.run(OVERFLOWS) == [], view  # nor do the cards in it
        paper = await shown.page.run("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(20, 24, 27)" if scheme == "dark" else "rgb(247, 247, 245)")
        assert shown.page.complaints == []


async def test_what_each_engine_would_have_cost_fits_a_phone(tmp_path: Path) -> None:
    parts = dict.fromkeys(["ahead", "prefill", "cache", "stall", "steps", "slowdown", "slot", "memory"], 1234.5)
    engine = {"cost": 12.5, "open": True, "in_flight": 1234, "hit_tokens": 123_456, "cost_parts_ms": parts}
    engines = [{"backend": f"http://a-backend-with-a-long-name-{number}.example:8000", **engine} for number in range(8)]
    decision = {"engines": engines, "prompt_tokens": 1000, "prefix_blocks": 3, "in_seconds": True}
    async with dashboard(House(2), tmp_path) as shown:
        await shown.page.resize(390, 844, is_phone=True)
        await shown.show("requests", f"{count('#tape')} === 1")
        await shown.page.run(
            "import('/dashboard/requests.js').then(({ prices }) => document.querySelector('main')"
            f".append(prices({json.dumps(decision)}, '')))"
        )
        await shown.page.until(f"{count('.costs tbody tr')} === 8")
        assert await shown.page.run(OVERFLOWS) == []
        assert await shown.page.run("document.documentElement.scrollWidth") <= 390
        names = "getComputedStyle(document.querySelector('.costs td:nth-child(2)'), '::before').content"
        assert await shown.page.run(names) != "none"  # the head of the table is hidden


async def test_a_legend_has_a_time_only_under_the_pointer(tmp_path: Path) -> None:
    rows = "[...document.querySelectorAll('.u-legend tr:first-child')]"
    times = f"{rows}.map((one) => one.getClientRects().length ? one.innerText : '')"
    async with dashboard(busy_house(), tmp_path) as shown:
        await shown.show("fleet", f"{count('canvas')} === 3")
        assert await shown.page.run(f"{times}.filter((text) => text)") == []
        await shown.page.run(POINT)
        await shown.page.until(f"{times}.every((text) => /\\d\\d:\\d\\d:\\d\\d/.test(text))")
        await shown.page.run(POINT_AWAY)
        await shown.page.until(f"{times}.every((text) => !text)")


async def test_failures_that_repeat_are_one_line(tmp_path: Path) -> None:
    async with dashboard(House(2), tmp_path) as shown:
        shown.finish(7, outcome="queue_full", error="The queue is full.", client="team-a")
        shown.finish(1, outcome="rejected", error="There is no such model.")
        await shown.show("timeline", "document.body.innerText.includes('queue_full (7 times)')")
        assert "rejected (" not in await shown.page.text()
        assert await shown.page.run("document.body.innerText.split('The queue is full.').length") == 2


async def test_requests_are_found_by_their_tenant(tmp_path: Path) -> None:
    async with dashboard(House(2), tmp_path) as shown:
        await shown.show("requests")
        shown.finish(2, tenant="team-a")
        shown.finish(3, tenant="team-b")
        await shown.page.until("document.querySelectorAll('#tape tbody tr').length === 5")
        await shown.page.type("#search", "team-a")
        await shown.page.until("document.querySelectorAll('#tape tbody tr').length === 2")
        assert "team-a" in await shown.page.text("#tape tbody")
        await shown.page.click("#hold")
        shown.finish(4)
        await shown.page.until("document.body.innerText.includes('held, 4 newer')")


async def test_backends_that_report_no_hits_are_said_to_save_nothing_known(tmp_path: Path) -> None:
    async with dashboard(House(2), tmp_path) as shown:
        shown.finish(20, backend="gpu-1", hit=None)
        await shown.show("saved", "document.body.innerText.includes('--enable-prompt-tokens-details')")


async def test_the_token_is_asked_for_and_kept_in_the_tab(tmp_path: Path) -> None:
    async with dashboard(busy_house(), tmp_path, token="t0ken") as shown:
        page = shown.page
        await page.until("!document.querySelector('#login').hidden")
        assert "Engines up" not in await page.text("main") or "3 / 3" not in await page.text("main")
        await page.type("#token", "wrong")
        await page.click("#login button")
        await page.until("!document.querySelector('#refused').hidden")
        await page.type("#token", "t0ken")
        await page.click("#login button")
        await page.until("document.querySelectorAll('.engine.up').length === 3")
        assert await page.run("document.querySelector('#login').hidden")
        assert await page.run("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        page.complaints.clear()  # the browser logs answers with 401
        await page.open(shown.url + "#gateway")
        await page.run("location.reload()")
        await page.until("document.documentElement.dataset.view === 'gateway' && document.documentElement.dataset.time")
        assert page.complaints == []


async def test_a_lost_connection_is_shown_and_made_again(tmp_path: Path) -> None:
    async with dashboard(busy_house(), tmp_path) as shown:
        await shown.page.run(
            "window.states = []; window.lamp = document.querySelector('#connection');"
            " new MutationObserver(() => states.push(lamp.className)).observe(lamp, {attributes: true})"
        )
        shown.house.gateway.operators.dashboard.end_streams()
        await shown.page.until("states.includes('lost') && states.at(-1) === 'live'")
