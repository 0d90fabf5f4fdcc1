"""Headers and API keys that decide when a request is served: its tenant, weight, class and deadline."""

import hashlib
import math
import re
from typing import Final

from gateway.errors import InvalidRequest
from gateway.front.http_request import ClientKey, HttpRequest

_SANE_NAME = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
_POSITIVE = re.compile(rb"(?=[0-9.]*[1-9])[0-9]{1,12}(?:\.[0-9]{1,9})?")
# The timeout of the client in seconds, as sent by the SDKs of OpenAI and Anthropic for Python and for Node.
_SDK_TIMEOUTS: Final[tuple[bytes, ...]] = (b"x-stainless-read-timeout", b"x-stainless-timeout")


class SchedulingHeaders:
    """Reads a request's tenant, weight, class and deadline from its headers and API key.

    `tenant_header`: empty = none. `comment_seconds`: the interval of keep-alive comments to silent streams; 0 = none.
    """

    def __init__(self, tenant_header: str = "", comment_seconds: float = 0.0) -> None:
        self._tenant_header = tenant_header.lower().encode()
        self._comment_seconds = comment_seconds

    def owner(self, incoming: HttpRequest) -> tuple[str, str]:
        """The API key's name and the tenant: what a client stores belongs to both."""
        key = incoming.key
        return key.name if key is not None else "", self._tenant(incoming.headers, key)

    def read(self, incoming: HttpRequest, *, streams: bool) -> tuple[str, float, bool, float | None]:
        """Tenant, weight, whether it is a batch request, and deadline in seconds. Raises InvalidRequest."""
        headers, key = incoming.headers, incoming.key
        weight, batch = (1.0, False) if key is None else (key.weight, key.priority == "batch")
        priority = headers.get(b"x-gateway-priority")
        if priority is not None:
            if priority.strip().lower() not in (b"interactive", b"batch"):
                raise InvalidRequest("The header X-Gateway-Priority must be interactive or batch.")
            # a client can lower its class, not raise it above its key's
            batch = batch or priority.strip().lower() == b"batch"
        deadline_seconds = _deadline(headers, incoming.arrived_seconds, self._comment_seconds if streams else 0.0)
        return self._tenant(headers, key), weight, batch, deadline_seconds

    def _tenant(self, headers: dict[bytes, bytes], key: ClientKey | None) -> str:
        name = headers[self._tenant_header].strip() if self._tenant_header in headers else b""
        if not name:
            return key.name if key is not None else ""
        if _SANE_NAME.fullmatch(name):
            return name.decode()
        return f"sha256-{hashlib.sha256(name).hexdigest()[:16]}"


def _deadline(headers: dict[bytes, bytes], arrived_seconds: float, comment_seconds: float) -> float | None:
    """When the answer must have begun, if the client says so.

    An SDK's timeout limits the time without data, so it sets no deadline where comments are sent more often.
    """
    value = headers.get(b"x-gateway-deadline-ms")
    if value is not None:
        if not _POSITIVE.fullmatch(value.strip()):
            raise InvalidRequest("The header X-Gateway-Deadline-Ms must be a positive number of milliseconds.")
        return arrived_seconds + float(value) / 1000
    for name in _SDK_TIMEOUTS:
        if (value := headers.get(name)) is None:
            continue
        try:
            seconds = float(value)
        except ValueError:
            continue
        if 0 < seconds < math.inf:
            return None if 0 < comment_seconds < seconds else arrived_seconds + seconds
    return None
