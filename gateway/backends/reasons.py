"""Why a backend could not be asked, in words for operators."""

import os
import socket
import ssl

import aiohttp


def why(error: BaseException) -> str:
    """A short reason, without the backend's address."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
    match cause:
        case ssl.SSLCertVerificationError():
            return f"TLS: {cause.verify_message.rstrip('.')}"
        case ssl.SSLError():
            return f"TLS: {(getattr(cause, 'reason', None) or str(cause)).lower().replace('_', ' ')}"
        case socket.gaierror():
            return f"host name not resolved: {(cause.strerror or str(cause)).lower()}"
        case TimeoutError():
            return "timed out"
        case aiohttp.ServerDisconnectedError():
            return "connection closed without a response"
        case aiohttp.ClientResponseError():
            return f"the response is not HTTP: {cause.message.splitlines()[0] if cause.message else cause.status}"
        case OSError() if cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno).lower()
    return str(cause) or type(cause).__name__
