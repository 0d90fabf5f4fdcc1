"""Requests of commands to a running gateway over HTTP.

By the standard library, and without a proxy: health checks must start quickly.
"""

import http.client
import os
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

_MOST_BYTES = 32 << 20


class AskError(Exception):
    """The gateway could not be reached, or refused; the message has the reason."""


def get(
    url: str,
    timeout_seconds: float,
    most_bytes: int,
    method: str = "GET",
    body: bytes | None = None,
    token: str = "",
    *,
    verify: bool = True,
) -> tuple[int, bytes]:
    """Status and body of an answer; `verify` the certificate, if there is one. Raises OSError."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if not verify:
        handlers.append(urllib.request.HTTPSHandler(context=_unverified()))
    opener = urllib.request.build_opener(*handlers)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    try:
        question = urllib.request.Request(url, body, headers, method=method)
        with opener.open(question, timeout=timeout_seconds) as answer:
            return answer.status, answer.read(most_bytes)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(most_bytes)
    except (ValueError, http.client.HTTPException) as error:
        raise OSError(str(error)) from None


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def why(error: OSError) -> str:
    """Why a URL cannot be reached, in plain words."""
    cause = getattr(error, "reason", error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS: {cause.verify_message.rstrip('.')}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {(cause.reason or str(cause)).lower().replace('_', ' ')}"
    if isinstance(cause, socket.gaierror):
        return f"host name not resolved: {(cause.strerror or str(cause)).lower()}"
    if isinstance(cause, TimeoutError):
        return "timed out"
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number).lower() if number else str(cause)


def ask_admin(
    url: str,
    path: str,
    token: str,
    method: str = "GET",
    document: object = None,
    timeout_seconds: float = 30.0,
    *,
    asked: str = "the admin port of a",
) -> dict[str, Any]:
    """The document at the path below the URL of the port in `asked`. Raises AskError."""
    import orjson

    whole = url.rstrip("/") + path
    try:
        sent = None if document is None else orjson.dumps(document)
        status, body = get(whole, timeout_seconds, most_bytes=_MOST_BYTES, method=method, body=sent, token=token)
    except OSError as error:
        raise AskError(f"{url} is unreachable: {why(error)}: is this {asked} running gateway?") from error
    answer = None
    with suppress(ValueError):
        answer = orjson.loads(body)
    if status in (200, 201) and answer and isinstance(answer, dict):
        return answer
    if status != 200 and isinstance(answer, dict):
        told = answer.get("error")
        reason = told.get("message") if isinstance(told, dict) else told
        if isinstance(reason, str):
            raise AskError(f"{url}: {reason}")
    what = "no gateway document" if status == 200 else status
    raise AskError(f"{whole} returned {what}: is this {asked} gateway?")


def livez_url(file: Path | None) -> str:
    """/livez of a gateway with this configuration file; without the file, at the default port. Raises ConfigError.

    If the client port has TLS, it is that of another port, if there is one: client certificates may be needed.
    """
    if file is None or not file.exists():
        return "http://127.0.0.1:8080/livez"
    from gateway.config.file import load

    server = load(file, []).server
    admin = server.admin if server.admin and (not server.admin.token or "/livez" in server.admin.open_paths) else None
    plain = (server.metrics or admin) if server.tls else server
    port = plain or server
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(port.host, port.host)
    return f"{'http' if plain else 'https'}://{f'[{host}]' if ':' in host else host}:{port.port}/livez"
