"""The configuration of traces: where they are sent, and how many requests have one."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator

from gateway.settings import Fraction, Seconds, Section, check_installed, default

_PATH = "/v1/traces"  # of OTLP over HTTP


class TracingConfig(Section):
    """OpenTelemetry traces of requests."""

    endpoint: str = default(
        "",
        "URL of an OTLP receiver, such as http://collector:4318 (http) or http://collector:4317 (grpc); empty = none.",
    )
    protocol: Literal["http", "grpc"] = default("http", "OTLP over HTTP (protobuf), or over gRPC.")
    sample_ratio: Fraction = default(0.01, "Share of requests that are traced, among those without a `traceparent`.")
    export_interval_seconds: Seconds = default(
        5.0, "The longest time until a finished trace is sent; 128 traces are sent at once."
    )
    service_name: str = default("vllm-batching-gateway", "The attribute `service.name`.", min_length=1, max_length=255)

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str) -> str:
        if not endpoint:
            return endpoint
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must look like http://host:port")
        check_installed("opentelemetry", "otel")
        return endpoint

    @property
    def url(self) -> str:
        """Where the exporter sends to: over HTTP, an endpoint without a path gets the usual one."""
        if self.protocol == "grpc" or urlsplit(self.endpoint).path.strip("/"):
            return self.endpoint
        return self.endpoint.rstrip("/") + _PATH
