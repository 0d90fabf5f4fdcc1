"""HTTP on the admin port: which requests it accepts, their bodies, and its answers.

A page in an operator's browser may give its own name the address of this port (DNS rebinding), and then read what the
port answers: the browser takes both for one origin. Such a request has the page's name in its `Host` header, so only
known names are accepted. Addresses and loopback names cannot be taken over like that. A page may also send requests
under the port's own address, whose answers it cannot read; browsers add `Origin` to those that change something.
"""

import asyncio
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any

import orjson
from aiohttp import web

from gateway.config import Listen
from gateway.errors import BodyTooLarge, HostNotAllowed, OriginNotAllowed, RequestTimeout

MAX_BODY_BYTES = 1048576  # parsed in a few milliseconds
_BODY_SECONDS = 10.0
SAFE_METHODS = ("GET", "HEAD")


def check_sender(request: web.Request, names: Collection[str]) -> None:
    """Raises HostNotAllowed or OriginNotAllowed for what a web page in a browser may have sent."""
    for host in request.headers.getall("host", ()):
        if not is_own_host(host, names):
            raise HostNotAllowed(
                f"The host {host[:256]!r} is not allowed on the admin port. Use an IP address, or add the name"
                " to server.admin.allowed_hosts."
            )
    if request.method not in SAFE_METHODS and "origin" in request.headers:
        raise OriginNotAllowed("Requests from web pages are not allowed on the admin port.")


def own_hosts(listen: Listen | None) -> frozenset[str]:
    """Names that the port is known by, as far as it is configured."""
    return frozenset() if listen is None else frozenset((listen.host.lower(), *listen.allowed_hosts)) - {""}


def is_own_host(header: str, names: Collection[str]) -> bool:
    """Whether a header is an IP address, a loopback name, or one of these names, with any port."""
    host = header.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif (parts := host.partition(":"))[2].isdigit() or not parts[2]:
        host = parts[0]
    host = host.removesuffix(".")
    if host == "localhost" or host.endswith(".localhost") or host in names:
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


async def body_of(request: web.Request) -> bytes:
    """The body of a request. Raises RequestTimeout or BodyTooLarge."""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.read()
    except TimeoutError as error:
        raise RequestTimeout(f"Timeout: the request body did not arrive within {_BODY_SECONDS:g} s.") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"The body exceeds {MAX_BODY_BYTES} bytes, the limit on the admin port.") from error


def as_json(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")
