import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.cli.admin_client import AdminError, ask_admin
from tests.unit.pages import serving


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    with serving(lambda _: (status, body)) as url:
        yield url


def test_a_document_comes_back() -> None:
    with answering(200, json.dumps({"breakers": []}).encode()) as url:
        assert ask_admin(url, "/admin/prefixes") == {"breakers": []}
        assert ask_admin(url + "/", "/admin/prefixes") == {"breakers": []}


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (404, b'{"error": "It is switched off."}', "{url}: It is switched off."),
        (404, b"404: Not Found", "{url}/x answered 404: is this the admin port of a gateway?"),
        (200, b"<html>", "{url}/x did not answer as a gateway does: is this its admin port?"),
        (200, b"[1]", "{url}/x did not answer as a gateway does: is this its admin port?"),
    ],
)
def test_other_answers_are_told_in_a_line(status: int, body: bytes, told: str) -> None:
    with answering(status, body) as url, pytest.raises(AdminError) as error:
        ask_admin(url, "/x")
    assert str(error.value) == told.format(url=url)


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:99999", "ftp://127.0.0.1"])
def test_what_is_no_url_is_told_in_a_line(url: str) -> None:
    with pytest.raises(AdminError, match="cannot be asked"):
        ask_admin(url, "/x")


def test_a_closed_port_is_told_in_a_line() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(AdminError, match=r"cannot be asked: .*refused"):
            ask_admin(url, "/x")
