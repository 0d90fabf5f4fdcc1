"""The configuration of backends: those that are listed, and where others are found."""

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from gateway.config.values import (
    BackendUrl,
    Count,
    CountOrAuto,
    Endpoint,
    HostName,
    Seconds,
    Secret,
    Section,
    check_installed,
    default,
)
from gateway.tls.contexts import BackendTls

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"  # a name in Kubernetes
_LABEL_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?"
_LABEL_RULE = (
    rf"\s*(!?{_LABEL_KEY}|{_LABEL_KEY}\s*(=|==|!=)\s*{_LABEL_VALUE}"
    rf"|{_LABEL_KEY}\s+(in|notin)\s*\(\s*{_LABEL_VALUE}(\s*,\s*{_LABEL_VALUE})*\s*\))\s*"
)
_SELECTOR = re.compile(rf"{_LABEL_RULE}(,{_LABEL_RULE})*", re.ASCII)


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


class DnsDiscovery(Section):
    """A name in DNS, each of whose addresses is a backend."""

    name: HostName = Field(description="Host name, such as that of a headless Kubernetes Service.")
    port: int | None = default(None, "Port of the backends; required for `record: a`.", ge=1, le=65535)
    record: Literal["a", "srv"] = default("a", "a = A and AAAA records; srv = SRV records, which have the ports, too.")
    tls: bool = default(False, "Use https.")
    nameserver: str = default(
        "",
        "IP address and port of a DNS server, such as 127.0.0.1:8600; empty = those of the system.",
        pattern=r"^([0-9.]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5})?$",
    )

    @model_validator(mode="after")
    def _is_installed(self) -> Self:
        check_installed("dns", "discovery")
        return self

    @model_validator(mode="after")
    def _has_a_port_unless_records_have_it(self) -> Self:
        if (self.port is None) != (self.record == "srv"):
            raise ValueError("set port for `record: a`, and not for `record: srv`")
        return self


class KubernetesDiscovery(Section):
    """EndpointSlices in Kubernetes, each of whose pods is a backend."""

    service: str = default("", "Name of the Service; alternative to `selector`.", pattern=rf"^({_LABEL})?$")
    selector: str = default(
        "", "Label selector of EndpointSlices, which have their Service's labels; alternative to `service`."
    )
    namespace: str = default(
        "", "Namespace; empty = that of the kubeconfig or of the pod, else default.", pattern=rf"^({_LABEL})?$"
    )
    port: int | str | None = default(
        None, "Port of the pods, by number or by its name in the Service; null = the only one."
    )
    tls: bool = default(False, "Use https.")
    zone: str = default("", "Only endpoints of this zone; empty = all.", max_length=63)
    kubeconfig: str = default("", "Path of a kubeconfig file; empty = the service account of the gateway's own pod.")

    @field_validator("selector")
    @classmethod
    def _is_a_label_selector(cls, selector: str) -> str:
        if selector and not _SELECTOR.fullmatch(selector):
            raise ValueError("must be a label selector, such as app=vllm or app in (vllm,vllm-canary)")
        return selector

    @field_validator("port")
    @classmethod
    def _is_a_number_or_a_name(cls, port: int | str | None) -> int | str | None:
        if isinstance(port, str) and port.isdecimal():
            port = int(port)  # of an environment variable
        is_valid = re.fullmatch(_LABEL, port) if isinstance(port, str) else port is None or 0 < port < 65536
        if not is_valid:
            raise ValueError("must be a number from 1 to 65535, or a name of lower-case letters, digits and -")
        return port

    @model_validator(mode="after")
    def _is_installed(self) -> Self:
        check_installed("kubernetes_asyncio", "kubernetes")
        return self

    @model_validator(mode="after")
    def _has_one_way_to_find_slices(self) -> Self:
        if bool(self.service) == bool(self.selector):
            raise ValueError("set either service or selector")
        return self


class DiscoveryConfig(Section):
    """Backends that are found while the gateway runs, besides those of `backends`."""

    file: str | None = default(None, "YAML file with a list like `backends`; read again when it changes. null = none.")
    dns: tuple[DnsDiscovery, ...] = default((), "Names in DNS, asked again when their records expire (30 s at most).")
    kubernetes: tuple[KubernetesDiscovery, ...] = default((), "EndpointSlices in Kubernetes, followed by a watch.")
    max_backends: Count = default(1024, "Backends used of one source; those beyond are left out, and the log says so.")
    backend: DiscoveredBackend = default(DiscoveredBackend(), "Settings of every backend that DNS or Kubernetes finds.")

    @field_validator("kubernetes")
    @classmethod
    def _has_distinct_entries(cls, entries: tuple[KubernetesDiscovery, ...]) -> tuple[KubernetesDiscovery, ...]:
        if len(set(entries)) < len(entries):
            raise ValueError("two entries are the same; remove one of them")
        return entries
