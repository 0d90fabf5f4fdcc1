"""Servers that know less than vLLM: without a list of models, and strict about fields."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from loadtest.access import Access
from loadtest.drive.fallback import adapted
from loadtest.drive.options import RunOptions
from loadtest.drive.target import Target, TargetError, look_at

ALL = ("ignore_eos", "min_tokens", "cache_salt")


def adapt(fake: Any, refuses: tuple[str, ...], **options: Any) -> tuple[RunOptions, str]:
    fake.act, fake.refuses = "strict", refuses
    said = StringIO()
    asked = RunOptions(url=fake.url, concurrency="2", requests=4, **options)
    return adapted(asked, {"": Target(["first"])}, Console(file=said, width=200)), said.getvalue()


@pytest.mark.parametrize(
    ("refuses", "salt", "ignore_eos"),
    [((), "auto", True), (("cache_salt",), "off", True), (("ignore_eos", "min_tokens"), "auto", False),
     (ALL, "off", False)],
)  # fmt: skip
def test_what_is_refused_is_left_out(
    fake_elsewhere: Any, refuses: tuple[str, ...], salt: str, ignore_eos: bool
) -> None:
    found, said = adapt(fake_elsewhere, refuses)
    assert (found.cache_salt, found.ignore_eos) == (salt, ignore_eos)
    assert ("refuses cache_salt" in said) == ("cache_salt" in refuses)
    assert ("refuses ignore_eos and min_tokens" in said) == ("ignore_eos" in refuses)


def test_a_request_that_would_carry_nothing_special_is_not_tried(fake_elsewhere: Any) -> None:
    found, said = adapt(fake_elsewhere, ALL, cache_salt="off", ignore_eos=False)
    assert (found.cache_salt, found.ignore_eos, said) == ("off", False, "")
    assert fake_elsewhere.bodies == []


def test_another_error_changes_nothing(fake_elsewhere: Any) -> None:
    fake_elsewhere.act = "refused_otherwise"
    asked = RunOptions(url=fake_elsewhere.url, concurrency="2", requests=4)
    assert adapted(asked, {"": Target(["first"])}, Console(file=StringIO())) == asked
    gone = asked.model_copy(update={"url": "http://127.0.0.1:9"})
    assert adapted(gone, {"": Target(["first"])}, Console(file=StringIO())) == gone


@pytest.mark.parametrize(("status", "answer"), [(404, "no such page"), (200, "<html>hello"), (200, '{"data": []}')])
async def test_a_model_that_is_given_needs_no_list_of_models(status: int, answer: str) -> None:
    async def models(request: web.Request) -> web.Response:
        return web.Response(status=status, text=answer)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    server = TestServer(app)
    await server.start_server()
    try:
        url = str(server.make_url("")).rstrip("/")
        assert (await look_at(url, Access(), "own")).models == ["own"]
        with pytest.raises(TargetError, match=re.escape(f"answers {status}, without models: {answer}. Give --model")):
            await look_at(url, Access())
    finally:
        await server.close()
