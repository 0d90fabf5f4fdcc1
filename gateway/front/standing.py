"""How a request stands in the waiting line: its tenant, the tenant's weight, its class, and its deadline."""

import hashlib
import math
import re
from collections.abc import Mapping

from gateway.config import KeyConfig
from gateway.errors import InvalidRequest
from gateway.front.incoming import Incoming
from gateway.request import Ask

_SANE_NAME = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
_POSITIVE = re.compile(rb"(?=[0-9.]*[1-9])[0-9]{1,12}(?:\.[0-9]{1,9})?")
_CLASSES = (b"interactive", b"batch")
# How long a client waits for an answer, in seconds, as SDKs tell it: OpenAI's and Anthropic's for Python, for Node.
_SDK_TIMEOUTS = (b"x-stainless-read-timeout", b"x-stainless-timeout")


class Standing:
    """Fills in what the waiting line needs to know of a request.

    `tenant_header`: empty = none. `comment_seconds`: streams that wait send something this often; 0 = nothing.
    """

    def __init__(self, tenant_header: str = "", comment_seconds: float = 0.0) -> None:
        self._tenant_header = tenant_header.lower().encode()
        self._comment_seconds = comment_seconds

    def owner(self, headers: Mapping[bytes, bytes], key: KeyConfig | None) -> tuple[str, str]:
        """The API key's name and the tenant: what a client stores belongs to both."""
        return key.name if key is not None else "", self._tenant(headers, key)

    def give(self, ask: Ask, incoming: Incoming, key: KeyConfig | None) -> None:
        """Set tenant, weight, class and deadline. Raises InvalidRequest for a class or deadline that is none."""
        headers = incoming.headers
        if key is not None:
            ask.weight, ask.batch = key.weight, key.priority == "batch"
        ask.tenant = self._tenant(headers, key)
        priority = headers.get(b"x-gateway-priority")
        if priority is not None:
            ask.batch = _is_batch(priority) or ask.batch  # a client lowers itself, and never rises above its key
        patient_after = self._comment_seconds if ask.streams else 0.0
        ask.deadline_seconds = _deadline(headers, incoming.arrived_seconds, patient_after)

    def _tenant(self, headers: Mapping[bytes, bytes], key: KeyConfig | None) -> str:
        told = headers.get(self._tenant_header, b"").strip() if self._tenant_header else b""
        return _name(told) if told else key.name if key is not None else ""


def _name(told: bytes) -> str:
    """A tenant's name as the proxy told it; what is too long or not plain text is told apart by its hash."""
    if _SANE_NAME.fullmatch(told):
        return told.decode()
    return f"sha256-{hashlib.sha256(told).hexdigest()[:16]}"


def _is_batch(priority: bytes) -> bool:
    told = priority.strip().lower()
    if told not in _CLASSES:
        raise InvalidRequest("The header X-Gateway-Priority must be interactive or batch.")
    return told == b"batch"


def _deadline(headers: dict[bytes, bytes], arrived_seconds: float, patient_after_seconds: float) -> float | None:
    """When the answer must have begun, if the client says so.

    An SDK's time-out is for the time in which nothing comes, so that a comment before it is over makes it patient.
    """
    told = headers.get(b"x-gateway-deadline-ms")
    if told is not None:
        if not _POSITIVE.fullmatch(told.strip()):
            raise InvalidRequest("The header X-Gateway-Deadline-Ms must be a positive number of milliseconds.")
        return arrived_seconds + float(told) / 1000
    for name in _SDK_TIMEOUTS:
        told = headers.get(name)
        if told is not None and (seconds := _seconds(told)) is not None:
            return None if 0 < patient_after_seconds < seconds else arrived_seconds + seconds
    return None


def _seconds(told: bytes) -> float | None:
    """A time-out that an SDK tells; what is no positive number says nothing."""
    try:
        seconds = float(told)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None
