"""Causes of an unreachable backend: the kind of failure, and the reason in words, without addresses.

The kinds are those of a probe's result, for requests as for probes, in logs and as the label `reason` of metrics.
"""

import os
import re
import socket
import ssl
from traceback import clear_frames

import aiohttp

from gateway.core.backends.health import UNREACHABLE_ERRNOS, ProbeResult
from gateway.core.resources import are_used_up

_ERRNO = re.compile(r"\[Errno (\d+)\]")


def why(error: BaseException) -> str:
    """A short reason, without the backend's address."""
    cause = _cause(error)
    number = _errno(cause)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS: {cause.verify_message.rstrip('.')}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {(getattr(cause, 'reason', None) or str(cause)).lower().replace('_', ' ')}"
    if isinstance(cause, socket.gaierror):
        return f"host name not resolved: {(cause.strerror or str(cause)).lower()}"
    if isinstance(cause, TimeoutError):
        return "timed out"
    if isinstance(cause, aiohttp.ServerDisconnectedError):
        return "connection closed without a response"
    if isinstance(cause, aiohttp.ClientResponseError):
        return f"the response is not HTTP: {cause.message.splitlines()[0] if cause.message else cause.status}"
    return os.strerror(number).lower() if number else str(cause) or type(cause).__name__


def kind_of(error: BaseException) -> ProbeResult:
    """The kind of a failure to reach a backend."""
    cause = _cause(error)
    if isinstance(cause, socket.gaierror):
        return ProbeResult.DNS
    if isinstance(cause, ssl.SSLError):
        return ProbeResult.TLS
    if isinstance(cause, OSError) and are_used_up(cause):
        return ProbeResult.UNSENT
    if isinstance(cause, ConnectionRefusedError) or _errno(cause) in UNREACHABLE_ERRNOS:
        return ProbeResult.REFUSED
    return ProbeResult.TIMEOUT if isinstance(cause, TimeoutError) else ProbeResult.BROKEN


def release(error: BaseException | None) -> None:
    """Free the objects held by the frames of an error and of its causes.

    Errors of aiohttp are in their own frames: else 80 objects of each one wait for the garbage collector, which stops
    the event loop for 50 ms once they are 50,000.
    """
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _cause(error: BaseException) -> BaseException:
    return error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error


def _errno(cause: BaseException) -> int | None:
    """The number of a system error; for a name with several addresses, of the first tried address."""
    if not isinstance(cause, OSError):
        return None
    if cause.errno is None and (found := _ERRNO.search(str(cause))):
        return int(found[1])
    return cause.errno if cause.errno is not None and cause.errno > 0 else None
