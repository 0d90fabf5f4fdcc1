"""Asks the admin port of a running gateway, for commands."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

_TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 32 << 20


class AdminError(Exception):
    """The admin port did not answer as one does; the message says it in one line."""


def ask_admin(url: str, path: str) -> dict[str, Any]:
    """The document at the path below the admin port's URL. Raises AdminError."""
    whole = url.rstrip("/") + path
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(whole, timeout=_TIMEOUT_SECONDS) as answer:
            body = answer.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            told = _document(error.read(_MOST_BYTES)).get("error")
        if isinstance(told, str):
            raise AdminError(f"{url}: {told}") from None
        raise AdminError(f"{whole} answered {error.code}: is this the admin port of a gateway?") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise AdminError(f"{url} cannot be asked: {why}") from None
    document = _document(body)
    if not document:
        raise AdminError(f"{whole} did not answer as a gateway does: is this its admin port?")
    return document


def _document(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
