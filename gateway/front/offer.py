"""A request that offers to go on in another protocol, as HTTP clients that would rather speak HTTP/2 do.

The offer is not taken up. llhttp leaves the body of such a request to the other protocol, so that a second parser, told
nothing but how the body is framed, has to read it.
"""

from collections.abc import Mapping
from typing import Protocol

import httptools


class BodyReceiver(Protocol):
    """What takes the body."""

    def on_body(self, data: bytes) -> None:
        """Body bytes."""

    def on_message_complete(self) -> None:
        """The request is complete."""


class _BodyOnly:
    """The callbacks of a parser whose head is made up."""

    def __init__(self, receiver: BodyReceiver) -> None:
        self.on_body = receiver.on_body
        self.on_message_complete = receiver.on_message_complete


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a body follows a head with these fields."""
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""


def body_parser(receiver: BodyReceiver, headers: Mapping[bytes, bytes]) -> httptools.HttpRequestParser:
    """A parser that stands behind such a head. The connection ends with the request."""
    parser = httptools.HttpRequestParser(_BodyOnly(receiver))
    name = b"transfer-encoding" if b"transfer-encoding" in headers else b"content-length"
    parser.feed_data(b"POST / HTTP/1.1\r\nconnection: close\r\n%b: %b\r\n\r\n" % (name, headers[name]))
    return parser
