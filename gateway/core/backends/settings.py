"""The configuration of backends."""

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from gateway.core.tls.contexts import BackendTls
from gateway.settings import BackendUrl, CountOrAuto, Endpoint, Seconds, Secret, Section, default


class KvEventsConfig(Section):
    """Endpoints of a backend's KV events. Rank r of a data-parallel backend uses these ports plus r."""

    endpoint: Endpoint = Field(description="tcp://host:port of the publisher; host * = the backend's host.")
    replay: Endpoint | None = default(None, "tcp://host:port that resends missed events; null = none.")
    topic: str | None = default(None, "Topic to subscribe to; null = all topics.")
    bind: bool = default(False, "Listen on `endpoint` for publishers that connect; false = connect.")


KvEvents = Annotated[  # YAML reads an unquoted `off` as false
    Literal["auto", "off"] | KvEventsConfig, BeforeValidator(lambda value: "off" if value is False else value)
]


class SleepConfig(Section):
    """vLLM's sleep mode; needs its --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1."""

    wake: bool = default(True, "Wake the backend when requests wait for its models.")
    idle_seconds: Seconds | None = default(None, "Put it to sleep after this time without requests; null = never.")


class DiscoveredBackend(Section):
    """Settings of every backend that DNS or Kubernetes finds."""

    api_key: Secret = default("", "Key sent to the backend; clients' keys are never forwarded.", pattern=r"^[!-~]*$")
    max_in_flight: CountOrAuto = default("auto", "Maximum sequences in flight; auto = vLLM's max_num_seqs, or learned.")
    kv_cache_tokens: CountOrAuto = default("auto", "Tokens in the KV cache; auto = kv_cache_size_tokens of /metrics.")
    kv_events: KvEvents = default("auto", "KV events; auto = /kv_event_sources, at the backend's host; off = none.")
    tls: BackendTls | None = default(None, "TLS of an https URL: own CA, client certificate; null = system's CAs.")
    relative_cost: float = default(1.0, "Relative time for the same work: 2 = half as fast as others.", gt=0)
    sleep: SleepConfig | None = default(None, "Put it to sleep and wake it by vLLM's sleep mode; null = do neither.")


class BackendConfig(DiscoveredBackend):
    """One vLLM server."""

    url: BackendUrl = Field(description="URL of the vLLM server: scheme, host and port only.")
    name: str = default("", "Unique name in metrics, logs and response headers; empty = host:port of `url`.")

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if not self.name:
            object.__setattr__(self, "name", urlsplit(self.url).netloc)
        if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,128}", self.name):
            raise ValueError(f"name {self.name!r} may contain only letters, digits and . _ : -")
        return self
