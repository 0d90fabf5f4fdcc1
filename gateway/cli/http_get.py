"""HTTP GET for commands, with the standard library alone: `gateway healthcheck` must start quickly."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

FAILURES = (OSError, ValueError, http.client.HTTPException)
_TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 32 << 20


class AdminError(Exception):
    """The admin port did not return its document; the message has one line."""


def get(url: str, timeout_seconds: float, most_bytes: int = _MOST_BYTES) -> tuple[int, bytes]:
    """Status and body of a response, without a proxy. Raises one of FAILURES if there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_seconds) as answer:
            return answer.status, answer.read(most_bytes)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(most_bytes)


def ask_admin(url: str, path: str) -> dict[str, Any]:
    """The document at the path below the admin port's URL. Raises AdminError."""
    whole = url.rstrip("/") + path
    try:
        status, body = get(whole, _TIMEOUT_SECONDS)
    except FAILURES as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise AdminError(f"{url} is unreachable: {why}") from None
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if status == 200 and document and isinstance(document, dict):
        return document
    if status != 200 and isinstance(document, dict) and isinstance(reason := document.get("error"), str):
        raise AdminError(f"{url}: {reason}")
    what = "no gateway document" if status == 200 else status
    raise AdminError(f"{whole} returned {what}: is this the admin port of a gateway?")
