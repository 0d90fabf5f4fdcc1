"""Settings of discovery: where backends are found while the gateway runs."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from gateway.core.backends.settings import DiscoveredBackend
from gateway.settings import Count, HostName, Section, check_installed, default

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"  # a name in Kubernetes
_LABEL_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?"
_LABEL_RULE = (
    rf"\s*(!?{_LABEL_KEY}|{_LABEL_KEY}\s*(=|==|!=)\s*{_LABEL_VALUE}"
    rf"|{_LABEL_KEY}\s+(in|notin)\s*\(\s*{_LABEL_VALUE}(\s*,\s*{_LABEL_VALUE})*\s*\))\s*"
)
_SELECTOR = re.compile(rf"{_LABEL_RULE}(,{_LABEL_RULE})*", re.ASCII)


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
    """Backends that are found while the gateway runs, in addition to `backends`."""

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

    @property
    def is_on(self) -> bool:
        return bool(self.file or self.dns or self.kubernetes)
