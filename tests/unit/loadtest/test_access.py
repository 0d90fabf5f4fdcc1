"""Headers and certificates: what is sent where, what is refused, and a server whose certificate nobody knows."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.access import Access
from loadtest.drive.client import Client, open_session
from loadtest.drive.plan import Plan
from loadtest.drive.record import CONNECT, OK, Record
from loadtest.drive.target import TargetError, look_at, read_counters
from loadtest.workloads.prompts import NO_GROUP, Prompt
from tests.certificates import certificate

SECRET = "s3cr3t-value"


def test_headers_are_those_of_the_options() -> None:
    access = Access.of("sk", ["X-Team: a:b", "x-empty:"])
    assert access.headers == {"authorization": "Bearer sk", "x-team": "a:b", "x-empty": ""}
    assert "sk" not in repr(access)


@pytest.mark.parametrize(
    ("headers", "complaint"),
    [
        ([SECRET], "NAME:VALUE"),
        ([f"no name: {SECRET}"], "NAME:VALUE"),
        ([f"x-team: {SECRET}\r\nx-more: 1"], "NAME:VALUE"),
        ([f"Content-Length: {SECRET}"], "sets it itself"),
        ([f"x-team: {SECRET}", f"X-Team: {SECRET}"], "give it once"),
        ([f"authorization: {SECRET}"], "beside --api-key"),
    ],
)
def test_a_header_that_cannot_be_sent_is_refused_without_its_value(headers: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        Access.of("sk", headers)
    assert SECRET not in str(refused.value)


def test_certificates_are_trusted_in_one_way(tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("none")
    with pytest.raises(ValueError, match="PEM"):
        Access.of(None, ca_file=tmp_path / "no.pem")
    with pytest.raises(ValueError, match="leave out --cacert"):
        Access.of(None, insecure=True, ca_file=tmp_path / "no.pem")


def test_headers_go_to_pages_of_the_target_and_nowhere_else() -> None:
    access = Access.of("sk")
    assert access.headers_of("https://u:p@host/metrics", "https://host/base") == access.headers
    for page in ("https://elsewhere/metrics", "https://host:9/metrics", "http://host/metrics"):
        assert access.headers_of(page, "https://host/base") == {}


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, list[str | None]]]:
    """A server with a certificate of its own, and the teams that asked."""
    teams: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        teams.append(request.headers.get("x-team"))
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        if request.path == "/metrics":
            return web.Response(text="# TYPE hits_total counter\nhits_total 3\n")
        return web.json_response({"choices": [{"message": {"content": "yes"}}]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate(folder, name="IP:127.0.0.1", days=1))
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=context)
    try:
        yield str(server.make_url("")).rstrip("/"), teams
    finally:
        await server.close()


async def sent(url: str, access: Access) -> Record:
    plan = Plan(url=url, model="m", stream=False, concurrency=1, requests=1, access=access)
    record = Record.planned(0, NO_GROUP, 0.0)
    async with open_session(plan) as session:
        await Client(plan, session, time.monotonic).send(
            record, plan.body_maker().body(Prompt(NO_GROUP, prefix="", tail="hi", max_tokens=1))
        )
    return record


async def test_a_certificate_that_nobody_knows_needs_an_option(tmp_path: Path) -> None:
    async with served(tmp_path) as (url, teams):
        with pytest.raises(TargetError, match="--cacert FILE"):
            await look_at(url, Access())
        assert (await sent(url, Access())).outcome == CONNECT
        for access in (Access.of(None, ["x-team: a"], ca_file=tmp_path / "cert.pem"),
                       Access.of(None, ["x-team: a"], insecure=True)):  # fmt: skip
            assert (await look_at(url, access)).models == ["m"]
            assert (await sent(url, access)).outcome == OK
            assert await read_counters(f"{url}/metrics", access, url) == {"hits_total": 3.0}
        assert set(teams) == {"a"}
        await read_counters(f"{url}/metrics", Access(insecure=True), "https://elsewhere")
        assert teams[-1] is None
