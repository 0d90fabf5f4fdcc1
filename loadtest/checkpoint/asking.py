"""Small questions to servers, bounded in time. What a server does not offer is None, never an exception."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from loadtest.checkpoint import redaction

ASK_SECONDS = 10.0
# A cold engine may take long over its first answer, and a loaded machine over any.
ANSWER_SECONDS = 120.0


def open_asker(api_key: str | None) -> aiohttp.ClientSession:
    """A session for questions: no proxies, no cookies; each question has a connection of its own."""
    headers = {"accept-encoding": "identity", "user-agent": "loadtest-check"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        timeout=aiohttp.ClientTimeout(total=ASK_SECONDS),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


class Unreachable(Exception):
    """Nobody answers at the URL."""


async def get(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    try:
        async with session.get(url, allow_redirects=False) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise Unreachable(redaction.text(f"{url}: {error or type(error).__name__}")) from None


async def get_text(session: aiohttp.ClientSession, url: str) -> str | None:
    """The page; None where there is none."""
    try:
        status, body = await get(session, url)
    except Unreachable:
        return None
    return body.decode("utf-8", "replace") if status == 200 else None


async def get_object(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """The JSON object; None where there is none."""
    page = await get_text(session, url)
    return None if page is None else parsed(page)


async def post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> tuple[int, bytes, str | None]:
    """Status, body, and the backend that the gateway names. Raises Unreachable."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    try:
        async with session.post(url, json=body, allow_redirects=False, timeout=timeout) as response:
            return response.status, await response.read(), response.headers.get("x-gateway-backend")
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise Unreachable(redaction.text(f"{url}: {error or type(error).__name__}")) from None


def parsed(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that the text is, if it is one."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
