import errno
import socket
import ssl

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from gateway.core.backends.health import ProbeResult
from gateway.core.backends.reachability import kind_of, why

KEY = ConnectionKey("10.0.0.1", 8000, False, True, None, None, None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (aiohttp.ClientConnectorError(KEY, ConnectionRefusedError(errno.ECONNREFUSED, "x")), "connection refused"),
        (aiohttp.ClientConnectorError(KEY, OSError(errno.ENETUNREACH, "x")), "network is unreachable"),
        (aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(-2, "Name or service not known")),
         "host name not resolved: name or service not known"),
        (aiohttp.ClientConnectorSSLError(KEY, ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")),
         "TLS: [ssl: wrong version number] wrong version number"),
        (aiohttp.ServerDisconnectedError(), "connection closed without a response"),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed ('10.0.0.1', 80)"), "connection refused"),
        (TimeoutError(), "timed out"),
        (ValueError(), "ValueError"),
        (ValueError("words"), "words"),
    ],
)  # fmt: skip
def test_a_reason_has_no_address(error: Exception, reason: str) -> None:
    assert why(error) == reason


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (aiohttp.ClientConnectorError(KEY, ConnectionRefusedError(errno.ECONNREFUSED, "x")), ProbeResult.REFUSED),
        (aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(-2, "Name or service not known")), ProbeResult.DNS),
        (aiohttp.ClientConnectorSSLError(KEY, ssl.SSLError(1, "x")), ProbeResult.TLS),
        (aiohttp.ClientConnectorCertificateError(KEY, ssl.SSLCertVerificationError(1, "x")), ProbeResult.TLS),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 80), [Errno 111] ..."),
         ProbeResult.REFUSED),
        (TimeoutError(), ProbeResult.TIMEOUT),
        (ConnectionResetError(errno.ECONNRESET, "x"), ProbeResult.BROKEN),
        (aiohttp.ServerDisconnectedError(), ProbeResult.BROKEN),
    ],
)  # fmt: skip
def test_kinds_of_failures_are_told_apart(error: Exception, kind: ProbeResult) -> None:
    assert kind_of(error) is kind
