"""The dashboard on the admin port: its files, its data, who may have it, and the playground."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from gateway.config import AdminConfig, Config, ConfigError, ServerConfig
from gateway.core.supervisor import Supervisor
from gateway.core.tls.contexts import ServerTls
from gateway.features.keys.settings import AuthConfig
from gateway.features.operate.admin_http import OWN_PAGE_MAY_SEND, OperatorPort
from gateway.features.page.broadcast import Broadcast
from gateway.features.page.decisions import Decisions
from gateway.features.page.routes import STATIC, DashboardPages
from tests.certificates import certificate
from tests.unit.page.test_broadcast import Shown
from tests.unit.page.test_decisions import Scene as DecisionScene

STREAM, PLAYGROUND = "/admin/dashboard/stream", "/admin/dashboard/playground"


class Port:
    """Asks a running admin port. `url`: where it is."""

    def __init__(self, session: aiohttp.ClientSession, port: int, stream: Broadcast) -> None:
        self.session, self.url, self.stream = session, f"http://127.0.0.1:{port}", stream

    async def ask(self, path: str, method: str = "GET", **options: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, **options) as response:
            body = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, orjson.loads(body) if is_json else body


@asynccontextmanager
async def admin_port(
    token: str = "",
    decisions: Decisions | None = None,
    preview: Any = None,
    server: ServerConfig | None = None,
    client_port: int = 0,
) -> AsyncIterator[Port]:
    loop = asyncio.get_running_loop()
    stream = Broadcast(Shown(), lambda _: None, Supervisor(loop.time), clock=lambda: 0.0, period_seconds=0.005)
    config = Config.model_construct(server=server or ServerConfig(), auth=AuthConfig(cache_salt_secret="s3cret"))
    made = decisions or DecisionScene().decisions
    pages = DashboardPages(stream, made, lambda: config, port=lambda: client_port, preview=preview)
    port = OperatorPort("server.admin", AdminConfig(port=0, token=token), STATIC.keys())
    async with port.listening(pages.routes()) as number, aiohttp.ClientSession() as session:
        assert number is not None
        try:
            yield Port(session, number, stream)
        finally:
            stream.stop()


async def test_the_files_need_no_token_and_all_data_does() -> None:
    async with admin_port(token="t0ken") as port:
        for path in STATIC:
            status, body = await port.ask(path)
            assert (status, len(body) > 100) == (200, True), path
        for path in (STREAM, "/admin/dashboard/config", "/admin/dashboard/reload", "/admin/dashboard/decisions/r"):
            assert (await port.ask(path))[0] == 401, path
        assert (await port.ask(PLAYGROUND, "POST", headers={"origin": port.url}))[0] == 401
        authorized = {"authorization": "Bearer t0ken"}
        status, shown = await port.ask("/admin/dashboard/config", headers=authorized)
        assert (status, shown["auth"]["cache_salt_secret"]) == (200, "***")


async def test_every_file_is_listed_and_refers_to_nothing_outside() -> None:
    folder = Path(__file__).parents[3] / "gateway" / "features" / "page" / "static"
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert files - {"uplot/README.md", "uplot/LICENSE"} == set(STATIC.values())
    own = "".join((folder / name).read_text() for name in files if not name.startswith("uplot/"))
    for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage", "https://", "style="):
        assert word not in own, word
    assert set(own.split("http://")[1:]) == {each for each in own.split("http://")[1:] if each.startswith("www.w3.org")}


async def test_the_page_may_load_its_own_files_alone() -> None:
    async with admin_port() as port, port.session.get(port.url + "/") as response:
        assert response.content_type == "text/html"
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        tag = response.headers["etag"]
        assert (await port.ask("/", headers={"if-none-match": tag}))[0] == 304
        assert (await port.ask("/", headers={"if-none-match": '"other"'}))[0] == 200


async def test_the_stream_begins_with_everything_and_goes_on() -> None:
    async with admin_port() as port, port.session.get(port.url + STREAM) as response:
        assert response.content_type == "text/event-stream"
        assert response.headers["cache-control"] == "no-store"
        kinds = [await response.content.readuntil(b"\n\n") for _ in range(3)]
        assert [kind.split(b"\n")[0] for kind in kinds] == [b"event: full", b"event: tick", b"event: tick"]


async def test_a_stream_that_is_closed_ends_as_a_complete_one() -> None:
    async with asyncio.timeout(5), admin_port() as port, port.session.get(port.url + STREAM) as response:
        assert (await response.content.readuntil(b"\n\n")).startswith(b"event: full")
        port.stream.end_streams()
        await response.content.read()
        assert port.stream.watchers == 0


async def test_a_decision_is_shown_by_the_id_of_its_request() -> None:
    scene = DecisionScene()
    await asyncio.to_thread(scene.send, "r.1")
    async with admin_port(decisions=scene.decisions) as port:
        status, document = await port.ask("/admin/dashboard/decisions/r.1")
        assert (status, document["model"], len(document["engines"])) == (200, "m", 2)
        status, document = await port.ask("/admin/dashboard/decisions/unknown")
        assert status == 404
        assert "while a page is open" in document["error"]["message"]


async def test_what_a_reload_would_change_is_shown_or_why_it_would_be_refused() -> None:
    async def changes() -> dict[str, Any]:
        return {"changed": [], "needs_restart": []}

    async def refuse() -> dict[str, Any]:
        raise ConfigError("gateway.yaml:3: routing.agin: unknown key")

    async with admin_port(preview=changes) as port:
        assert await port.ask("/admin/dashboard/reload") == (200, {"changed": [], "needs_restart": []})
    async with admin_port(preview=refuse) as port:
        status, document = await port.ask("/admin/dashboard/reload")
        assert status == 400
        assert "routing.agin: unknown key" in document["error"]["message"]


@pytest.mark.parametrize("path", OWN_PAGE_MAY_SEND)
async def test_other_pages_may_send_nothing_and_the_own_page_only_this(path: str) -> None:
    async with admin_port() as port:
        own = port.url.removeprefix("http://")
        foreign = ["http://evil.example", "null", "http://127.0.0.1:1", f"http://{own}.evil.example", "file://", own]
        for origin in foreign:
            status, answer = await port.ask(path, "POST", headers={"origin": origin})
            assert (status, answer["error"]["code"]) == (403, "origin_not_allowed"), origin
        for origin in (f"http://{own}", f"https://{own}"):
            assert (await port.ask(path, "POST", headers={"origin": origin}))[0] in (400, 404)
            status, answer = await port.ask("/admin/reload", "POST", headers={"origin": origin})
            assert (status, answer["error"]["code"]) == (403, "origin_not_allowed")


@asynccontextmanager
async def client_port(tls: ServerTls | None = None) -> AsyncIterator[tuple[int, list[tuple[str, Any, bytes]]]]:
    """Plays the gateway's client port; gives what it was sent."""
    came: list[tuple[str, Any, bytes]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        came.append((request.path, dict(request.headers), await request.read()))
        if request.headers.get("authorization") != "Bearer sk-1":
            return web.json_response({"error": {"message": "Invalid API key."}}, status=401)
        more = {"x-gateway-backend": "a", "x-request-id": "r", "x-secret": "s", "content-type": "text/event-stream"}
        response = web.StreamResponse(headers=more)
        await response.prepare(request)
        for _ in range(3):
            await response.write(b"data: {}\n\n")
        return response

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.context() if tls else None).start()
    try:
        yield int(runner.addresses[0][1]), came
    finally:
        await runner.cleanup()


async def test_the_playground_sends_as_a_client_with_the_key_that_was_typed() -> None:
    async with client_port() as (number, came), admin_port(token="t0ken", client_port=number) as port:
        headers = {"authorization": "Bearer t0ken", "origin": port.url, "x-playground-key": "sk-1", "cookie": "a=b"}
        url = f"{port.url}{PLAYGROUND}?path=/v1/chat/completions"
        async with port.session.post(url, data=b'{"model":"m"}', headers=headers) as response:
            assert (response.status, await response.read()) == (200, b"data: {}\n\n" * 3)
            assert response.content_type == "text/event-stream"
            assert (response.headers["x-gateway-backend"], response.headers["x-request-id"]) == ("a", "r")
            assert "x-secret" not in response.headers
        [(path, sent, body)] = came
        assert (path, body) == ("/v1/chat/completions", b'{"model":"m"}')
        assert sent["Authorization"] == "Bearer sk-1"  # never the token of the admin port
        assert {"cookie", "origin", "x-playground-key"}.isdisjoint(name.lower() for name in sent)


async def test_the_playground_needs_a_key_where_clients_do() -> None:
    async with client_port() as (number, came), admin_port(token="t0ken", client_port=number) as port:
        status, answer = await port.ask(
            f"{PLAYGROUND}?path=/v1/completions", "POST", data=b"{}", headers={"authorization": "Bearer t0ken"}
        )
        assert (status, answer) == (401, {"error": {"message": "Invalid API key."}})
        assert "Authorization" not in came[0][1]


@pytest.mark.parametrize("path", ["", "/metrics", "/v1/models", "/v1/chat/completions/../../admin", "//evil.example/"])
async def test_the_playground_sends_to_some_paths_only(path: str) -> None:
    async with client_port() as (number, came), admin_port(client_port=number) as port:
        status, answer = await port.ask(PLAYGROUND, "POST", params={"path": path}, data=b"{}")
        assert (status, answer["error"]["param"]) == (400, "path")
        assert came == []


async def test_the_playground_trusts_the_certificate_of_the_client_port_alone(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        certificate(folder, name="DNS:gateway.example", days=2)
    served = ServerTls(certificate=str(own / "both.pem"))
    for folder, expected in ((own, 200), (other, 500)):
        server = ServerConfig(tls=ServerTls(certificate=str(folder / "both.pem")))
        async with client_port(served) as (number, _), admin_port(server=server, client_port=number) as port:
            status, _ = await port.ask(
                f"{PLAYGROUND}?path=/v1/completions", "POST", data=b"{}", headers={"x-playground-key": "sk-1"}
            )
            assert status == expected


async def test_a_client_port_that_does_not_answer_is_an_error() -> None:
    async with admin_port(client_port=1) as port:
        status, answer = await port.ask(f"{PLAYGROUND}?path=/v1/completions", "POST", data=b"{}")
        assert status == 500
        assert answer["error"]["message"] == "The client port did not answer: ClientConnectorError."
