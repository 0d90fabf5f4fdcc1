"""Which address is the client's behind proxies, and which pages may read an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.front.origin import TrustedProxies, WebPages

PROXIES = TrustedProxies(("10.0.0.0/8", "::1/128"))


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", b"192.0.2.7", "192.0.2.7"),
        ("10.0.0.1", b"203.0.113.9, 192.0.2.7", "192.0.2.7"),  # what a client wrote itself is ignored
        ("10.0.0.1", b"192.0.2.7, 10.1.1.1", "192.0.2.7"),  # two proxies
        ("::1", b"2001:db8::1", "2001:db8::1"),
        ("::ffff:10.0.0.1", b"192.0.2.7", "192.0.2.7"),
        ("10.0.0.1", b"192.0.2.7:4711", "192.0.2.7"),
        ("10.0.0.1", b"[2001:db8::1]:4711", "2001:db8::1"),
        ("10.0.0.1", b"10.0.0.2, 10.0.0.3", "10.0.0.2"),
        ("10.0.0.1", b"unknown", "10.0.0.1"),
        ("10.0.0.1", b"192.0.2.7, _hidden", "10.0.0.1"),
        ("10.0.0.1", b"", "10.0.0.1"),
        ("192.0.2.1", b"192.0.2.7", "192.0.2.1"),  # no trusted proxy
        ("", b"192.0.2.7", ""),  # the client has left
    ],
)
def test_the_client_is_the_last_address_that_is_no_trusted_proxy(peer: str, forwarded: bytes, client: str) -> None:
    assert PROXIES.client(peer, forwarded) == client


@given(st.binary(max_size=200))
def test_any_header_gives_an_address(forwarded: bytes) -> None:
    assert PROXIES.client("10.0.0.1", forwarded).isascii()


def test_a_page_of_a_listed_origin_may_read_and_others_may_not() -> None:
    pages = WebPages(("https://chat.example.com",))
    assert b"access-control-allow-origin: https://chat.example.com\r\n" in pages.headers(
        {b"origin": b"https://chat.example.com"}
    )
    for headers in ({}, {b"origin": b"https://evil.example"}, {b"origin": b"https://chat.example.com.evil.example"}):
        assert pages.headers(headers) == b"vary: origin\r\n"


def test_a_star_is_for_every_page() -> None:
    lines = WebPages(("*",)).headers({b"origin": b"null"})
    assert b"access-control-allow-origin: null\r\n" in lines
