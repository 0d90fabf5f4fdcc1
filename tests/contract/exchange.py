"""Send a case to an engine and describe the whole answer as plain data."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from tests.contract.cases import Case

TIMEOUT_SECONDS = 60.0
Answer = dict[str, Any]


def connect(url: str) -> http.client.HTTPConnection:
    """A fresh connection to the engine."""
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)


def headers_of(case: Case) -> dict[str, str]:
    """JSON unless the case says otherwise."""
    return {"Content-Type": "application/json", **case.headers} if case.method == "POST" else dict(case.headers)


def ask(url: str, case: Case) -> Answer:
    """Status, headers as sent, and the body: parsed `json`, SSE `events`, or `text`."""
    connection = connect(url)
    try:
        connection.request(case.method, case.path, case.payload(), headers_of(case))
        response = connection.getresponse()
        body = response.read()
        return {"status": response.status, "headers": response.getheaders(), **describe(response, body)}
    finally:
        connection.close()


def describe(response: http.client.HTTPResponse, body: bytes) -> Answer:
    """The body in its most readable lossless form."""
    kind = response.headers.get_content_type()
    text = body.decode()
    if kind == "text/event-stream":
        events = text.split("\n\n")
        assert events.pop() == "", "a stream ends with a blank line"
        return {"events": events}
    return {"json": json.loads(text)} if kind == "application/json" else {"text": text}
