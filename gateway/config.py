"""The configuration: its schema and its defaults."""

import hashlib
import re
from collections import Counter
from functools import cached_property
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from gateway.config_values import (
    BackendUrl,
    Count,
    CountOrAuto,
    Endpoint,
    Fraction,
    HostName,
    ListenHost,
    Network,
    Origin,
    Seconds,
    SecondsOrZero,
    Section,
    check_installed,
    default,
)
from gateway.tls import BackendTls, ServerTls

_TAKEN_HEADER = re.compile(
    "authorization|connection|content-(encoding|length|type)|expect|host|trace(parent|state)|transfer-encoding"
    "|x-(api-key|data-parallel-rank|request-id)"
)
_NO_DIGESTS = (bytes(32), hashlib.sha256(b"").digest())  # placeholders
SECRETS = ("api_key", "key", "key_sha256", "cache_salt_secret", "token")  # keys whose values are never shown
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"  # a name in Kubernetes
_LABEL_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?"
_LABEL_RULE = (
    rf"\s*(!?{_LABEL_KEY}|{_LABEL_KEY}\s*(=|==|!=)\s*{_LABEL_VALUE}"
    rf"|{_LABEL_KEY}\s+(in|notin)\s*\(\s*{_LABEL_VALUE}(\s*,\s*{_LABEL_VALUE})*\s*\))\s*"
)
_SELECTOR = re.compile(rf"{_LABEL_RULE}(,{_LABEL_RULE})*", re.ASCII)


class ConfigError(Exception):
    """The configuration is invalid; the message names the key and the reason."""


class Listen(Section):
    """Address to listen on."""

    host: ListenHost = default("127.0.0.1", "IP address or host name to listen on; empty = all interfaces.")
    port: int = default(8081, "TCP port to listen on; 0 = any free port.", ge=0, le=65535)
    allowed_hosts: tuple[HostName, ...] = default((), "Names accepted in `Host` besides `host`, localhost and IPs.")


class AdminConfig(Listen):
    """The admin port (/metrics, /livez, /readyz, /admin/*)."""

    token: str = default(
        "",
        "Token that requests must have (`Authorization: Bearer ...`), but for `open_paths`; empty = none.",
        pattern=r"^[!-~]*$",
    )
    open_paths: tuple[Literal["/metrics", "/livez", "/readyz"], ...] = default(
        ("/metrics", "/livez", "/readyz"), "Paths that need no token."
    )


class MetricsConfig(Listen):
    """A port for /metrics, /livez and /readyz alone."""

    host: ListenHost = default("0.0.0.0", "IP address or host name to listen on; empty = all interfaces.")
    port: int = default(8082, "TCP port to listen on; 0 = any free port.", ge=0, le=65535)


class ServerConfig(Section):
    """The client port with its limits and timeouts."""

    host: ListenHost = default("0.0.0.0", "IP address or host name to listen on; empty = all interfaces.")
    port: int = default(8080, "TCP port to listen on; 0 = any free port.", ge=0, le=65535)
    tls: ServerTls | None = default(None, "TLS of this port; null = plain HTTP.")
    trusted_proxies: tuple[Network, ...] = default((), "Networks of proxies whose X-Forwarded-For names the client.")
    cors_origins: tuple[Origin, ...] = default((), 'Origins whose web pages may call the API (CORS); "*" = all.')
    admin: AdminConfig | None = default(AdminConfig(), "Admin port (/metrics, /livez, /readyz, /admin/*); null = none.")
    metrics: MetricsConfig | None = default(
        None, "Another port for /metrics, /livez and /readyz, without a token; null = none."
    )
    max_connections: Count = default(16384, "Maximum client connections; more are closed immediately.")
    max_body_bytes: Count = default(
        8388608, "Maximum size of a request body; larger ones get 413. 8 MiB block the event loop for up to 40 ms."
    )
    max_upload_bytes: Count = default(536870912, "Maximum audio upload, streamed to the backend; larger ones get 413.")
    memory_budget_bytes: Count = default(1073741824, "Memory for bodies, uploads, queue and responses; beyond it, 503.")
    max_json_depth: Count = default(64, "Maximum nesting depth of a JSON body; else 400.")
    max_json_containers: Count = default(16384, "Maximum objects and arrays in a JSON body; else 400.")
    max_json_strings: Count = default(65536, "Maximum strings in a JSON body; else 400.")
    max_json_values: Count = default(262144, "Maximum values in a JSON body; else 400.")
    allow_media_urls: bool = default(False, "Let requests name http(s) URLs of media for the backend to fetch.")
    max_sequences: Count = default(1024, "Maximum sequences (n x prompts) of one request; else 400.")
    header_timeout_seconds: Seconds = default(10.0, "Timeout from the first byte to the end of the headers; then 408.")
    body_timeout_seconds: Seconds = default(300.0, "Timeout from the end of the headers to that of the body; then 408.")
    body_grace_seconds: Seconds = default(5.0, "Window over which the rate of a body is measured.")
    body_min_bytes_per_second: float = default(1024.0, "Minimum rate of a request body; else 408.", gt=0)
    keep_alive_seconds: Seconds = default(75.0, "Idle timeout of client connections; then they are closed.")
    write_stall_seconds: Seconds = default(60.0, "Timeout for a client that reads nothing: its request is aborted.")
    drain_delay_seconds: SecondsOrZero = default(5.0, "Time after SIGTERM that /readyz fails; requests are accepted.")
    drain_timeout_seconds: SecondsOrZero = default(600.0, "Then: time limit of running requests; the rest are aborted.")
    response_headers: bool = default(True, "Send the x-gateway-* response headers.")
    access_log: bool = default(True, "Write one JSON line per request to standard output.")
    access_log_prefixes: bool = default(False, "Log salted hashes of prefix blocks, for `loadtest record`.")


class KvEventsConfig(Section):
    """Endpoints of a backend's KV events. Rank r of a data-parallel backend uses these ports plus r."""

    endpoint: Endpoint = Field(description="tcp://host:port of the publisher; host * = the backend's host.")
    replay: Endpoint | None = default(None, "tcp://host:port that resends missed events; null = none.")
    topic: str | None = default(None, "Topic to subscribe to; null = all topics.")
    bind: bool = default(False, "Listen on `endpoint` for publishers that connect; false = connect.")


KvEvents = Annotated[  # YAML reads an unquoted `off` as false
    Literal["auto", "off"] | KvEventsConfig, BeforeValidator(lambda value: "off" if value is False else value)
]


class DiscoveredBackend(Section):
    """Settings of every backend that DNS or Kubernetes finds."""

    api_key: str = default("", "Key sent to the backend; clients' keys are never forwarded.", pattern=r"^[!-~]*$")
    max_in_flight: CountOrAuto = default("auto", "Maximum sequences in flight; auto = vLLM's max_num_seqs, or learned.")
    kv_cache_tokens: CountOrAuto = default("auto", "Tokens in the KV cache; auto = kv_cache_size_tokens of /metrics.")
    kv_events: KvEvents = default("auto", "KV events; auto = /kv_event_sources, at the backend's host; off = none.")
    tls: BackendTls | None = default(None, "TLS of an https URL: own CA, client certificate; null = system's CAs.")
    relative_cost: float = default(1.0, "Relative time for the same work: 2 = half as fast as others.", gt=0)


class BackendConfig(DiscoveredBackend):
    """One vLLM server."""

    url: BackendUrl = Field(description="URL of the vLLM server: scheme, host and port only.")
    name: str = default("", "Unique name in metrics, logs and response headers; empty = host:port of `url`.")
    speed: float | None = default(None, "Deprecated: former name of `relative_cost`.", gt=0, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _accepts_the_former_name(cls, document: Any) -> Any:
        if not isinstance(document, dict) or document.get("speed") is None:
            return document
        if "relative_cost" in document:
            raise ValueError("speed is the former name of relative_cost: remove it")
        return document | {"relative_cost": document["speed"]}

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
    backend: DiscoveredBackend = default(DiscoveredBackend(), "Settings of every backend that DNS or Kubernetes finds.")

    @field_validator("kubernetes")
    @classmethod
    def _has_distinct_entries(cls, entries: tuple[KubernetesDiscovery, ...]) -> tuple[KubernetesDiscovery, ...]:
        if len(set(entries)) < len(entries):
            raise ValueError("two entries are the same; remove one of them")
        return entries


class RoutingConfig(Section):
    """How a backend is selected for a request."""

    policy: Literal["prefix", "least_loaded", "round_robin"] = default(
        "prefix", "prefix = lowest cost, considering cached prefixes; least_loaded; round_robin."
    )
    decode_weight: float = default(1.0, "Decoding weight: 0 = TTFT only, 1 = balanced, 5 = end-to-end latency.", ge=0)
    prefill_window_seconds: Seconds | None = default(
        None, "Maximum prefill work queued on an engine; beyond it, requests wait here. null = no maximum."
    )
    seconds_per_prefill_token: float = default(28e-6, "b: initial prefill time per uncached token; then learned.", gt=0)
    aging: float = default(0.05, "Cost credit, in seconds, per second that a request has waited.", ge=0)
    index_capacity_factor: float = default(1.0, "Size of the own prefix record, in KV cache sizes.", gt=0, le=1000)
    index_memory_bytes: Count = default(536870912, "Maximum memory of the own records of all backends together.")
    scan: int = default(32, "Maximum requests, first in order, considered per queue scan.", ge=1, le=256)
    starvation_seconds: Seconds = default(30.0, "Wait after which the emptiest backend may be kept for a request.")


class AdmissionConfig(Section):
    """Utilization of backends, queue limits and queue timeout."""

    kv_headroom: Fraction = default(1.0, "Share of KV cache that requests may reserve; lower it against preemption.")
    max_queued_requests: int = default(4096, "Maximum queued requests; more get 429. 0 = no queue.", ge=0)
    max_queued_bytes: int = default(268435456, "Maximum total size of queued request bodies; more get 429.", ge=0)
    max_wait_seconds: Seconds = default(60.0, "Queue timeout: then 429, or 503 if no backend can serve the model.")
    hold_without_backend: bool = default(True, "Queue requests while no backend serves the model; false = 503 at once.")
    comment_seconds: SecondsOrZero = default(15.0, "Interval of keep-alive comments to queued streams; 0 = none.")
    tenant_header: str = default(
        "", "Header with the tenant, set by a trusted proxy; empty = API key.", pattern=r"^([A-Za-z0-9-]{1,64})?$"
    )
    adaptive: bool = default(True, "Lower a backend's limit of sequences in flight while it is overloaded.")
    itl_objective_seconds: Seconds | None = default(None, "Mean inter-token latency that means overload; null = none.")

    @field_validator("tenant_header")
    @classmethod
    def _has_no_meaning_already(cls, name: str) -> str:
        if _TAKEN_HEADER.fullmatch(name.lower()):
            raise ValueError("this header is reserved; use another name")
        return name


class EmbeddingsConfig(Section):
    """Batching of embeddings requests across clients, and splitting of long lists."""

    coalesce: bool = default(True, "Batch requests, and split long lists; false = forward unchanged.")
    max_batch_items: Count = default(64, "Maximum inputs or documents in one batch; longer lists are split.")
    max_batch_tokens: Count = default(8192, "Maximum estimated tokens in one batch.")
    max_delay_seconds: SecondsOrZero = default(0.005, "Maximum wait for more inputs while batches are in flight.")
    deduplicate: bool = default(False, "Deprecated: no effect. Version 0.3 will refuse it.", exclude=True)
    cache: bool = default(True, "Cache embedding vectors, up to `cache_bytes`.")
    cache_bytes: int = default(0, "Memory for cached vectors of all models; 0 = no cache.", ge=0)


class HealthConfig(Section):
    """Health probes, and ejection of failing backends."""

    probe_interval_seconds: Seconds = default(2.0, "Interval between health probes of a backend.")
    probe_timeout_seconds: Seconds = default(2.0, "Timeout of a health probe; then the probe has failed.")
    fall: int = default(3, "Consecutive failed probes until a backend is down.", ge=1)
    rise: int = default(2, "Consecutive successful probes until a backend is up again.", ge=1)
    eject_failures: int = default(5, "Consecutive failed requests until a backend is ejected.", ge=1)
    eject_base_seconds: Seconds = default(5.0, "Duration of the first ejection; doubles at each relapse.")
    eject_max_seconds: Seconds = default(60.0, "Maximum duration of an ejection.")
    max_ejected: Fraction = default(0.5, "Maximum share of a model's backends ejected at once.")
    slow_start_seconds: SecondsOrZero = default(30.0, "Time for a recovered backend's cap to grow from 1/10 to full.")
    refresh_seconds: Seconds = default(30.0, "Interval of rereading a backend's models and version.")


class UpstreamConfig(Section):
    """Connections to backends, timeouts and retries."""

    connect_timeout_seconds: Seconds = default(2.0, "Timeout for connecting to a backend; then another one is tried.")
    first_byte_timeout_seconds: Seconds | None = default(
        None, "Timeout for the first byte of a response; then 504. null = none: long prompts take long."
    )
    idle_stream_timeout_seconds: Seconds = default(300.0, "Timeout between pieces of a response; then it is cut off.")
    keep_alive_seconds: Seconds = default(3.0, "Idle timeout of pooled connections; below the backend's (vLLM: 5 s).")
    max_connection_age_seconds: Seconds = default(300.0, "Maximum age of pooled connections, to follow DNS changes.")
    retry_budget_fraction: Fraction = default(0.1, "Retries allowed per request served.")
    retry_budget_min: int = default(10, "Retries allowed before any request was served.", ge=0)


class KeyConfig(Section):
    """An API key that clients may use."""

    name: str = Field(min_length=1, max_length=64, description="Unique name in logs, metrics and reports.")
    key: str = default("", "API key in plain text; alternative to `key_sha256`.")
    key_sha256: str = default("", "SHA-256 of the API key in hex; alternative to `key`.", pattern=r"^([0-9a-f]{64})?$")
    isolate_cache: bool = default(False, "Use a KV-cache salt of its own, to share no cached prefixes with other keys.")
    weight: float = default(1.0, "Relative share of tokens while other tenants also wait.", gt=0)
    priority: Literal["interactive", "batch"] = default(
        "interactive", "batch = after queued interactive requests; a request header can lower the priority."
    )
    requests_per_minute: Count | None = default(None, "Maximum requests per minute; more get 429. null = unlimited.")
    tokens_per_minute: Count | None = default(
        None, "Maximum prompt and output tokens per minute, as estimated, later by usage; null = no limit."
    )
    max_concurrent_requests: Count | None = default(
        None, "Maximum running and queued requests; more get 429. null = unlimited."
    )

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if bool(self.key) == bool(self.key_sha256):
            raise ValueError("set either key or key_sha256, not both")
        if self.digest in _NO_DIGESTS:
            raise ValueError("key_sha256 is a placeholder (zeros or the digest of an empty string); set a key's digest")
        return self

    @cached_property
    def digest(self) -> bytes:
        return bytes.fromhex(self.key_sha256) or hashlib.sha256(self.key.encode()).digest()


class AuthConfig(Section):
    """Authentication of clients."""

    keys: tuple[KeyConfig, ...] = default((), "API keys of clients; empty = no authentication.")
    cache_salt_secret: str = default("", "Secret for all cache salts, of isolate_cache too; empty = random at start.")

    @model_validator(mode="after")
    def _has_distinct_keys(self) -> Self:
        owners: dict[bytes, str] = {}
        names = set[str]()
        for key in self.keys:
            if key.name in names:
                raise ValueError(f"duplicate key name {key.name!r}; key names must be unique")
            if key.digest in owners:
                raise ValueError(f"{owners[key.digest]!r} and {key.name!r} are the same key; remove one of them")
            owners[key.digest] = key.name
            names.add(key.name)
        return self


class ModelEmbeddingsConfig(Section):
    """Batching of embeddings requests for one model."""

    coalesce: bool | None = default(None, "Overrides `embeddings.coalesce`; null = no override.")
    deduplicate: bool | None = default(None, "Deprecated: no effect. Version 0.3 will refuse it.", exclude=True)
    cache: bool | None = default(None, "Overrides `embeddings.cache`; null = no override.")


class ModelConfig(Section):
    """Settings of one model, by the name that backends use."""

    tokenizer: str = default(
        "",
        "Folder or Hugging Face name: prompts are tokenized here too, for exact prefix routing and usage in batches.",
    )
    embeddings: ModelEmbeddingsConfig = default(ModelEmbeddingsConfig(), "Overrides of `embeddings` for this model.")

    @field_validator("tokenizer")
    @classmethod
    def _is_installed(cls, source: str) -> str:
        if source:
            check_installed("transformers", "tokenizer")
        return source


class ModelsConfig(Section):
    """Model aliases, and settings by model name."""

    model_config = ConfigDict(extra="allow")  # of the type below
    __pydantic_extra__: dict[str, ModelConfig] = Field(init=False)

    aliases: dict[str, str] = default({}, "Maps names that clients use to names that backends use.")

    @model_validator(mode="after")
    def _has_no_section_for_an_alias(self) -> Self:
        if wrong := sorted(self.by_name.keys() & self.aliases.keys()):
            raise ValueError(f"{wrong[0]!r} is an alias; use a section for {self.aliases[wrong[0]]!r} instead")
        return self

    @property
    def by_name(self) -> dict[str, ModelConfig]:
        return self.__pydantic_extra__ or {}


class PrefixReportConfig(Section):
    """The report on prefix reuse and cache misses at /admin/prefixes."""

    enabled: bool = default(True, "Sample prompts (up to 512, 8 MiB) to find causes of cache misses.")
    show_text: bool = default(False, "Show excerpts of prompts; false = hashes, kinds and positions.")


class StateConfig(Section):
    """What the gateway has learned, kept on disk for its next start."""

    path: str | None = default(None, "Folder of a snapshot, written once a minute; has secrets. null = none.")


class FileConfig(Section):
    """The configuration file itself."""

    watch: bool = default(False, "Reload when the file changes; it is looked at once a second.")


class Config(Section):
    """The configuration file."""

    config: FileConfig = FileConfig()
    server: ServerConfig = ServerConfig()
    backends: tuple[BackendConfig, ...] = ()
    discovery: DiscoveryConfig = DiscoveryConfig()
    routing: RoutingConfig = RoutingConfig()
    admission: AdmissionConfig = AdmissionConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()
    health: HealthConfig = HealthConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    auth: AuthConfig = AuthConfig()
    models: ModelsConfig = ModelsConfig()
    prefix_report: PrefixReportConfig = PrefixReportConfig()
    state: StateConfig = StateConfig()

    def embeds(self, how: Literal["coalesce", "cache"], model: str) -> bool:
        """The setting of this model's own section, or of the section for all models."""
        section = self.models.by_name.get(model)
        own = None if section is None else getattr(section.embeddings, how)
        return bool(getattr(self.embeddings, how) if own is None else own)

    @property
    def named_models(self) -> frozenset[str]:
        """Models with a section of their own or an alias: backends are expected to have them."""
        return frozenset((*self.models.by_name, *self.models.aliases.values()))

    @property
    def without_effect(self) -> list[str]:
        sections: dict[str, EmbeddingsConfig | ModelEmbeddingsConfig] = {"embeddings": self.embeddings}
        sections |= {f"models.{name}.embeddings": model.embeddings for name, model in self.models.by_name.items()}
        return [f"{at}.deduplicate" for at, section in sections.items() if "deduplicate" in section.model_fields_set]

    @property
    def renamed(self) -> dict[str, str]:
        """Deprecated keys that the file has, with their new names."""
        old = [number for number, backend in enumerate(self.backends) if backend.speed is not None]
        return {f"backends.{number}.speed": f"backends.{number}.relative_cost" for number in old}

    @model_validator(mode="after")
    def _has_distinct_backends(self) -> Self:
        found = self.discovery
        if not (self.backends or found.file or found.dns or found.kubernetes):
            raise ValueError("backends is empty, and discovery has no source: list at least one backend")
        for each in self.backends:  # of those that are found, one setting is for all, and some may be http
            if each.tls is not None and not each.url.startswith("https://"):
                raise ValueError(f"{each.name} has tls, which is for https, and its url is {each.url}")
        names = Counter(backend.name for backend in self.backends)
        if twice := sorted(name for name, times in names.items() if times > 1):
            raise ValueError(f"duplicate backend name {twice[0]!r}; backend names must be unique")
        return self
