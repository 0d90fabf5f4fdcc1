"""Receivers of OTLP, over HTTP and over gRPC. It needs the extra `otel`.

Their settings are OpenTelemetry's variables `OTEL_EXPORTER_OTLP_*`; variables with `TRACES_` have precedence.
"""

import gzip
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import requests
from opentelemetry.util.re import parse_env_headers

from gateway.files import MAX_PEM_BYTES, read_file

_PASSING_STATUSES = (408, 429, 502, 503, 504)
_PASSING_CODES = frozenset(
    ["CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"]
)
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_MOST_RECONNECT_MS = 5000  # else a receiver that is back is noticed after up to two minutes
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "none": bytes}
_GRPC_COMPRESSION = {"gzip": "Gzip", "deflate": "Deflate", "none": "NoCompression"}


class NotTaken(Exception):
    """An export that did not arrive, or was refused. `is_passing`: it may be sent again."""

    def __init__(self, reason: str, *, is_passing: bool, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_passing = is_passing
        self.retry_after_seconds = retry_after_seconds  # 0 = the receiver does not say


class OtlpSettings(NamedTuple):
    """How a receiver is reached. Files are paths; none = the usual certificates, and none of the gateway's own."""

    headers: dict[str, str]
    timeout_seconds: float
    compression: str
    certificate: str | None
    client_certificate: str | None
    client_key: str | None
    user_agent: str

    @classmethod
    def of(cls, variables: Mapping[str, str], user_agent: str) -> Self:
        """Raises ValueError for a compression or a timeout that is none."""

        def value(name: str) -> str:
            found = variables.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or variables.get(f"OTEL_EXPORTER_OTLP_{name}")
            return (found or "").strip()

        compression = value("COMPRESSION").lower() or "none"
        if compression not in _COMPRESS:
            raise ValueError(f"OTEL_EXPORTER_OTLP_COMPRESSION must be gzip, deflate or none, not {compression!r}.")
        return cls(
            headers=dict(parse_env_headers(value("HEADERS"), liberal=True)),
            timeout_seconds=float(value("TIMEOUT") or 10),
            compression=compression,
            certificate=value("CERTIFICATE") or None,
            client_certificate=value("CLIENT_CERTIFICATE") or None,
            client_key=value("CLIENT_KEY") or None,
            user_agent=user_agent,
        )


class OtlpReceiver(Protocol):
    """Sends exports, one at a time."""

    timeout_seconds: float  # of one export with its retries

    def send(self, export: bytes, timeout_seconds: float) -> None:
        """Send one export within this time. Raises NotTaken."""

    def close(self) -> None:
        """Close its connections; nothing can be sent afterwards."""


class HttpReceiver:
    """Receives OTLP over HTTP, in protobuf and perhaps compressed."""

    def __init__(self, url: str, settings: OtlpSettings) -> None:
        self.timeout_seconds = settings.timeout_seconds
        self._url = url
        self._compress = _COMPRESS[settings.compression]
        session = self._session = requests.Session()
        session.headers.update({"user-agent": settings.user_agent, "content-type": "application/x-protobuf"})
        if settings.compression != "none":
            session.headers["content-encoding"] = settings.compression
        session.headers.update(settings.headers)
        session.verify = settings.certificate or True
        if settings.client_certificate:
            own = settings.client_certificate
            session.cert = (own, settings.client_key) if settings.client_key else own

    def send(self, export: bytes, timeout_seconds: float) -> None:
        try:
            answer = self._session.post(
                self._url, self._compress(export), timeout=timeout_seconds, allow_redirects=False
            )
        except requests.RequestException as error:
            raise NotTaken(str(error), is_passing=isinstance(error, requests.ConnectionError)) from error
        if answer.status_code // 100 != 2:
            after = answer.headers.get("retry-after", "")
            raise NotTaken(
                f"{answer.status_code} {answer.reason}",
                is_passing=answer.status_code in _PASSING_STATUSES,
                retry_after_seconds=float(after) if after.isdecimal() else 0.0,
            )

    def close(self) -> None:
        self._session.close()


class GrpcReceiver:
    """A receiver of OTLP over gRPC, with a channel that reconnects by itself."""

    def __init__(self, url: str, settings: OtlpSettings) -> None:
        import grpc

        self.timeout_seconds = settings.timeout_seconds
        self._metadata = [(name.lower(), value) for name, value in settings.headers.items()]
        self._error = grpc.RpcError
        scheme, _, target = url.partition("://")
        target = target.partition("/")[0]
        options = [
            ("grpc.primary_user_agent", settings.user_agent),
            ("grpc.max_reconnect_backoff_ms", _MOST_RECONNECT_MS),
        ]
        more = {"options": options, "compression": grpc.Compression[_GRPC_COMPRESSION[settings.compression]]}
        if scheme == "http":
            self._channel = grpc.insecure_channel(target, **more)
        else:
            files = settings.certificate, settings.client_key, settings.client_certificate
            pems = [read_file(Path(file), MAX_PEM_BYTES) if file else None for file in files]
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(*pems), **more)
        self._call = self._channel.unary_unary(_EXPORT)

    def send(self, export: bytes, timeout_seconds: float) -> None:
        try:
            self._call(export, timeout=timeout_seconds, metadata=self._metadata)
        except self._error as error:
            code = error.code().name
            raise NotTaken(f"{code}: {error.details()}", is_passing=code in _PASSING_CODES) from error

    def close(self) -> None:
        self._channel.close()
