import asyncio
import io
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import AdminConfig, Listen, MetricsConfig
from gateway.core.errors import ModelNotFound, NoBackend
from gateway.core.observe.metrics import Breathe, Metrics
from gateway.features.insights.page import PrefixPage
from gateway.features.operate.admin import AdminPages, MetricsPages, breather
from gateway.features.operate.admin_http import OperatorPort, is_own_host, own_hosts

NAMES = {"gateway.svc"}


async def no_route(body: bytes, path: str) -> dict[str, Any]:
    raise AssertionError(f"{path} was asked for")


async def three_wait() -> dict[str, Any]:
    return {"waiting": 3}


@asynccontextmanager
async def admin_port(
    listen: Listen | None = None,
    snapshot: Callable[[Breathe], Any] | None = None,
    backends: Callable[[], dict[str, Any]] = dict,
    route: Any = no_route,
    prepare: Any = lambda _: None,
) -> AsyncIterator[int | None]:
    """A port with all pages."""
    pages = MetricsPages(snapshot or Metrics().snapshot, lambda: None).routes()
    pages += AdminPages(backends, route, three_wait).routes()
    pages += PrefixPage(prepare).routes()
    async with OperatorPort("server.admin", listen or Listen(port=0)).listening(pages) as port:
        yield port


async def test_metrics_and_backends_are_served_on_a_port_of_their_own() -> None:
    metrics = Metrics()
    metrics.attempts.add(("a", "ok"))
    backends = {"backends": [{"name": "a", "state": "up"}]}
    async with (
        admin_port(snapshot=metrics.snapshot, backends=lambda: backends) as port,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
            assert response.headers["content-type"].startswith("text/plain")
            assert 'gateway_upstream_attempts_total{backend="a",result="ok"} 1.0' in await response.text()
        async with session.get(f"http://127.0.0.1:{port}/admin/backends") as response:
            assert await response.json() == {"backends": [{"name": "a", "state": "up"}]}
        async with session.get(f"http://127.0.0.1:{port}/admin/queue") as response:
            assert await response.json() == {"waiting": 3}
        async with session.get(f"http://127.0.0.1:{port}/v1/models") as response:
            assert response.status == 404


async def test_open_metrics_are_served_by_content_negotiation() -> None:
    headers = {"accept": "application/openmetrics-text; version=1.0.0"}
    async with (
        admin_port() as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics", headers=headers) as response,
    ):
        assert (await response.text()).endswith("# EOF\n")


async def test_it_can_be_switched_off() -> None:
    async with OperatorPort("server.admin", None).listening([]) as port:
        assert port is None


@pytest.mark.parametrize(("query", "path"), [("", ""), ("?path=/v1/completions", "/v1/completions")])
async def test_a_dry_run_shows_where_a_body_would_go(query: str, path: str) -> None:
    asked: list[tuple[bytes, str]] = []

    async def route(body: bytes, path: str) -> dict[str, Any]:
        asked.append((body, path))
        return {"chosen": "a"}

    async with (
        admin_port(route=route) as port,
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}/admin/route{query}", data=b"{}") as response,
    ):
        assert (response.status, await response.json()) == (200, {"chosen": "a"})
    assert asked == [(b"{}", path)]


async def test_a_dry_run_of_what_would_be_refused_says_why() -> None:
    async def route(body: bytes, path: str) -> dict[str, Any]:
        raise ModelNotFound("The model 'x' does not exist.", param="model")

    async with (
        admin_port(route=route) as port,
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}/admin/route", data=b"{}") as response,
    ):
        assert response.status == 404
        assert (await response.json())["error"]["param"] == "model"


@asynccontextmanager
async def asked(hosts: Iterable[str] = (), **settings: Any) -> AsyncIterator[Callable[..., Any]]:
    """Ask a port that is known by these names and has these settings."""

    async def route(body: bytes, path: str) -> dict[str, Any]:
        return {"bytes": len(body)}

    listen = AdminConfig(port=0, allowed_hosts=tuple(hosts), **settings)
    async with admin_port(listen, route=route) as port, aiohttp.ClientSession() as session:

        async def ask(method: str, path: str, **options: Any) -> tuple[int, Any]:
            async with session.request(method, f"http://127.0.0.1:{port}{path}", **options) as response:
                is_json = response.content_type == "application/json"
                return response.status, await response.json() if is_json else None

        yield ask


@pytest.mark.parametrize("path", ["/admin/queue", "/admin/backends", "/metrics", "/nowhere"])
async def test_a_page_that_has_its_own_name_point_here_reads_nothing(path: str) -> None:
    async with asked(["gateway.svc"]) as ask:
        for host in ("evil.example", "evil.example:8081", "127.0.0.1.evil.example"):
            status, answer = await ask("GET", path, headers={"host": host})
            assert status == 403
            assert answer["error"]["code"] == "host_not_allowed"
        for host in ("localhost:8081", "10.0.0.1", "[::1]:8081", "gateway.svc:8081"):
            assert (await ask("GET", path, headers={"host": host}))[0] == (404 if path == "/nowhere" else 200)


def test_names_are_those_that_are_configured() -> None:
    assert own_hosts(Listen(host="Admin.example", allowed_hosts=("gateway.SVC.",))) == {"admin.example", "gateway.svc"}
    assert own_hosts(Listen(host="")) == own_hosts(None) == frozenset()


@pytest.mark.parametrize("path", ["/admin/queue", "/admin/backends", "/nowhere", "/metrics/x"])
async def test_a_token_keeps_everyone_else_out(path: str) -> None:
    async with asked(token="s3cret") as ask:
        for given in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer s3cre"}, {"authorization": "s3cret"},
                      {"authorization": "Basic s3cret"}, {"authorization": "Bearer s3cretx"},
                      {"authorization": "Bearer \udcff"}):  # fmt: skip
            status, answer = await ask("GET", path, headers=given)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), given
        for given in ("Bearer s3cret", "bearer  s3cret "):
            status, _ = await ask("GET", path, headers={"authorization": given})
            assert status == (200 if path.startswith("/admin") else 404), given


@pytest.mark.parametrize("open_paths", [("/metrics", "/livez", "/readyz"), ("/livez",), ()])
async def test_paths_for_probes_and_scrapes_need_the_token_unless_they_are_open(open_paths: tuple[str, ...]) -> None:
    async with asked(token="s3cret", open_paths=open_paths) as ask:
        for path in ("/metrics", "/livez", "/readyz"):
            assert (await ask("GET", path))[0] == (200 if path in open_paths else 401)
            assert (await ask("GET", path, headers={"authorization": "Bearer s3cret"}))[0] == 200


async def test_a_reload_changes_the_token() -> None:
    port = OperatorPort("server.admin", AdminConfig(port=0))
    async with port.listening(AdminPages(dict, no_route, three_wait).routes()) as number:
        url = f"http://127.0.0.1:{number}/admin/queue"
        assert (await ask(url))[0] == 200
        port.apply(AdminConfig(port=0, token="s3cret"))
        assert (await ask(url))[0] == 401


async def test_the_metrics_port_has_nothing_else() -> None:
    is_ready = [False]

    def check_ready() -> None:
        if not is_ready[0]:
            raise NoBackend("No backend is available.")

    pages = MetricsPages(Metrics().snapshot, check_ready).routes()
    async with (
        OperatorPort("server.metrics", MetricsConfig(host="127.0.0.1", port=0)).listening(pages) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):

        async def status(path: str, method: str = "GET", **headers: str) -> int:
            async with session.request(method, path, headers=headers) as response:
                return response.status

        assert [await status(path) for path in ("/metrics", "/livez", "/readyz")] == [200, 200, 503]
        for method in ("HEAD", "OPTIONS"):
            assert [await status(path, method) for path in ("/livez", "/readyz")] == [200, 503]
        is_ready[0] = True
        assert [await status(path) for path in ("/readyz", "/admin/backends", "/v1/models")] == [200, 404, 404]
        assert await status("/metrics", host="evil.example") == 403


async def test_the_body_of_a_dry_run_is_bounded() -> None:
    async with asked() as ask:
        assert await ask("POST", "/admin/route", data=io.BytesIO(b"x" * 1048576)) == (200, {"bytes": 1048576})
        status, answer = await ask("POST", "/admin/route", data=io.BytesIO(b"x" * 1048577))
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    assert "1048576 bytes" in answer["error"]["message"]


async def test_the_body_of_a_dry_run_does_not_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.features.operate.admin_http._BODY_SECONDS", 0.05)

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with asked() as ask:
        status, answer = await ask("POST", "/admin/route", data=endless())
    assert (status, answer["error"]["code"]) == (408, "request_timeout")


async def test_metrics_are_taken_on_the_loop_and_rendered_beside_it() -> None:
    seen, metrics = list[int](), Metrics()
    metrics.gauge("gateway_x", "X.", (), lambda: (seen.append(threading.get_ident()), [((), 1.0)])[1])

    class Family:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def collect(self) -> Any:
            seen.append(threading.get_ident())
            yield from self._inner.collect()

    async with (
        admin_port(snapshot=lambda breathe: Family(metrics.snapshot(breathe))) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics") as response,
    ):
        assert "gateway_x 1.0" in await response.text()
    assert [each == threading.get_ident() for each in seen] == [True, False]


@asynccontextmanager
async def serving(
    prepare: Callable[[float | None], Callable[[Breathe], dict[str, Any]] | None],
) -> AsyncIterator[str]:
    async with admin_port(prepare=prepare) as port:
        yield f"http://127.0.0.1:{port}/admin/prefixes"


async def ask(url: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.json()


async def test_a_snapshot_is_taken_on_the_loop_and_the_report_made_beside_it() -> None:
    loop_thread = threading.get_ident()
    seen: list[object] = []

    def prepare(window_seconds: float | None) -> Callable[[Breathe], dict[str, Any]]:
        seen.append((window_seconds, threading.get_ident() == loop_thread))

        def make(breathe: Callable[[], None]) -> dict[str, Any]:
            breathe()
            seen.append(threading.get_ident() == loop_thread)
            return {"breakers": []}

        return make

    async with serving(prepare) as url:
        assert await ask(url) == (200, {"breakers": []})
        assert await ask(f"{url}?minutes=2.5") == (200, {"breakers": []})
    assert seen == [(None, True), False, (150.0, True), False]


async def test_reports_are_made_one_after_the_other() -> None:
    running = threading.Lock()

    def make(_: Callable[[], None]) -> dict[str, Any]:
        assert running.acquire(blocking=False)
        entered.set()
        proceed.wait(5)
        running.release()
        return {}

    entered, proceed = threading.Event(), threading.Event()
    async with serving(lambda _: make) as url, asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(url)) for _ in range(3)]
        await asyncio.to_thread(entered.wait, 5)
        proceed.set()
    assert [each.result() for each in asked] == [(200, {})] * 3


async def test_a_bad_number_of_minutes_is_refused() -> None:
    async with serving(lambda _: lambda _: {}) as url:
        for minutes in ("x", "-1", "nan", "inf"):
            assert await ask(f"{url}?minutes={minutes}") == (
                400,
                {"error": "The parameter minutes must be a number of at least 0."},
            )


async def test_it_says_that_it_is_switched_off() -> None:
    async with serving(lambda _: None) as url:
        assert await ask(url) == (404, {"error": "The prefix report is disabled: set prefix_report.enabled to true."})


def test_work_is_interrupted_by_rests() -> None:
    now, slept = [0.0], list[float]()
    breathe = breather(lambda: now[0], slept.append)
    for _ in range(10):
        now[0] += 0.0004
        breathe()
    assert slept == [0.001] * 3


@pytest.mark.parametrize(
    "header",
    ["localhost", "LOCALHOST:8081", "a.localhost", "localhost.", "127.0.0.1", "127.0.0.1:8081", "10.1.2.3:80", "[::1]",
     "[::1]:8081", "[fe80::1%eth0]:1", "gateway.svc", "Gateway.SVC:8081", "gateway.svc.", "localhost:"],
)  # fmt: skip
def test_addresses_loopback_names_and_configured_names_are_own(header: str) -> None:
    assert is_own_host(header, NAMES)


@pytest.mark.parametrize(
    "header",
    ["", "evil.example", "evil.example:8081", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost",
     "evil.localhost.example", "gateway.svc.evil.example", "127.0.0.1:x", "localhost:80@evil.example", "2130706433",
     "[evil.example]", "127.1", "svc"],
)  # fmt: skip
def test_all_others_are_not(header: str) -> None:
    assert not is_own_host(header, NAMES)


@given(st.from_regex(r"[a-z0-9.-]{1,20}\\.example(:[0-9]{1,5})?", fullmatch=True))
def test_no_name_that_can_be_registered_is_own(header: str) -> None:
    assert not is_own_host(header, NAMES)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_address_is_own(address: object, port: int) -> None:
    host = f"[{address}]" if ":" in str(address) else str(address)
    assert is_own_host(host, ())
    assert is_own_host(f"{host}:{port}", ())
