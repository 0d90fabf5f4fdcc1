"""The configuration: its schema and its defaults."""

import hashlib
import re
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

_MOST_SECONDS = 1e8  # three years: timers take no more
Seconds = Annotated[float, Field(gt=0, le=_MOST_SECONDS)]
Fraction = Annotated[float, Field(ge=0, le=1)]
_TAKEN_HEADERS = frozenset(
    ("authorization", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
     "traceparent", "tracestate", "transfer-encoding", "x-api-key", "x-data-parallel-rank", "x-request-id")
)  # fmt: skip
_NO_DIGESTS = (bytes(32), hashlib.sha256(b"").digest())  # placeholders
_TCP = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}")
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MAX_HOST_LENGTH = 253


class ConfigError(Exception):
    """The configuration is invalid; the message names the key and the reason."""


class Section(BaseModel):
    """A part of the file: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _checked_host(host: str) -> str:
    """The host, if it is an IP address or a name that can be looked up."""
    try:
        ip_address(host)
    except ValueError:
        pass
    else:
        return host
    name = host.removesuffix(".")
    if len(name) > _MAX_HOST_LENGTH or not all(map(_HOST_LABEL.fullmatch, name.split("."))):
        raise ValueError(f"{host!r} is not a host name (labels of 1 to 63 letters, digits, - or _; at most 253 in all)")
    return host


ListenHost = Annotated[str, AfterValidator(lambda host: _checked_host(host) if host else host)]  # "" = all addresses


class Listen(Section):
    """Address to listen on."""

    host: ListenHost = Field("127.0.0.1", description="IP address or host name to listen on; empty = all interfaces.")
    port: int = Field(8081, ge=0, le=65535, description="TCP port to listen on; 0 = any free port.")
    allowed_hosts: tuple[str, ...] = Field(
        (), description="Names accepted in `Host` besides IP addresses, localhost and `host`."
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_checked_host(name).lower().removesuffix(".") for name in names)


class ServerConfig(Section):
    """The client port with its limits and timeouts."""

    host: ListenHost = Field("0.0.0.0", description="IP address or host name to listen on; empty = all interfaces.")
    port: int = Field(8080, ge=0, le=65535, description="TCP port to listen on; 0 = any free port.")
    admin: Listen | None = Field(
        Listen(), description="Admin port (/metrics, /admin/*), without authentication; null disables it."
    )
    max_connections: int = Field(16384, gt=0, description="Maximum client connections; more are closed immediately.")
    max_body_bytes: int = Field(
        8388608,
        gt=0,
        description="Maximum size of a request body; larger ones get 413. 8 MiB block the event loop for up to 40 ms.",
    )
    max_upload_bytes: int = Field(
        536870912, gt=0, description="Maximum audio upload, which is streamed to the backend; larger ones get 413."
    )
    memory_budget_bytes: int = Field(
        1073741824,
        gt=0,
        description="Maximum memory for bodies, uploads, queue and buffered responses; beyond it, 503.",
    )
    max_json_depth: int = Field(64, gt=0, description="Maximum nesting depth of a JSON body; else 400.")
    max_json_containers: int = Field(16384, gt=0, description="Maximum objects and arrays in a JSON body; else 400.")
    max_json_strings: int = Field(65536, gt=0, description="Maximum strings in a JSON body; else 400.")
    max_json_values: int = Field(262144, gt=0, description="Maximum values in a JSON body; else 400.")
    allow_media_urls: bool = Field(
        False, description="Let requests name http(s) URLs of media for the backend to fetch."
    )
    max_sequences: int = Field(1024, gt=0, description="Maximum sequences (n x prompts) of one request; else 400.")
    header_timeout_seconds: Seconds = Field(
        10.0, description="Timeout from a request's first byte to the end of its headers; then 408."
    )
    body_timeout_seconds: Seconds = Field(
        300.0, description="Timeout from the end of the headers to the end of the body; then 408."
    )
    body_grace_seconds: Seconds = Field(5.0, description="Window over which the rate of a body is measured.")
    body_min_bytes_per_second: float = Field(1024.0, gt=0, description="Minimum rate of a request body; else 408.")
    keep_alive_seconds: Seconds = Field(75.0, description="Idle timeout of client connections; then they are closed.")
    write_stall_seconds: Seconds = Field(
        60.0, description="Timeout for a client that reads none of its response; then the request is aborted."
    )
    drain_delay_seconds: float = Field(
        5.0, ge=0, le=_MOST_SECONDS, description="After SIGTERM: time in which /readyz fails and requests are accepted."
    )
    drain_timeout_seconds: float = Field(
        600.0, ge=0, le=_MOST_SECONDS, description="Then: maximum time for running requests; the rest are aborted."
    )
    response_headers: bool = Field(True, description="Send the x-gateway-* response headers.")
    access_log: bool = Field(True, description="Write one JSON line per request to standard output.")
    access_log_prefixes: bool = Field(False, description="Log salted hashes of prefix blocks, for `loadtest record`.")


class KvEventsConfig(Section):
    """Endpoints of a backend's KV events. Rank r of a data-parallel backend uses these ports plus r."""

    endpoint: str = Field(description="tcp://host:port of the publisher; host * = the backend's host.")
    replay: str | None = Field(None, description="tcp://host:port that resends missed events; null = none.")
    topic: str | None = Field(None, description="Topic to subscribe to; null = all topics.")
    bind: bool = Field(False, description="Listen on `endpoint` for publishers that connect; false = connect.")

    @field_validator("endpoint", "replay")
    @classmethod
    def _is_tcp(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not _TCP.fullmatch(endpoint):
            raise ValueError("must look like tcp://host:port")
        if endpoint is not None and not 0 < int(endpoint.rpartition(":")[2]) < 65536:
            raise ValueError("the port must be a number from 1 to 65535")
        if endpoint is not None and (host := endpoint[len("tcp://") :].rpartition(":")[0]) != "*":
            _checked_host(host.removeprefix("[").removesuffix("]"))
        return endpoint


class BackendConfig(Section):
    """One vLLM server."""

    url: str = Field(description="URL of the vLLM server: scheme, host and port only.")
    name: str = Field("", description="Unique name in metrics, logs and response headers; empty = host:port of `url`.")
    api_key: str = Field(
        "", pattern=r"^[!-~]*$", description="Key sent to the backend; clients' keys are never forwarded."
    )
    max_in_flight: int | Literal["auto"] = Field(
        "auto", description="Maximum sequences in flight; auto = vLLM's max_num_seqs if exposed, else learned."
    )
    kv_cache_tokens: int | Literal["auto"] = Field(
        "auto", description="Size of the KV cache in tokens; auto = kv_cache_size_tokens of the backend's /metrics."
    )
    kv_events: Literal["auto", "off"] | KvEventsConfig = Field(
        "auto",
        description="KV event source; auto (default) = /kv_event_sources, at the backend's own host; off = none.",
    )
    relative_cost: float = Field(1.0, gt=0, description="Relative time for the same work: 2 = half as fast as others.")
    speed: float | None = Field(None, gt=0, exclude=True, description="Deprecated: former name of `relative_cost`.")

    @field_validator("url")
    @classmethod
    def _is_an_origin(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must look like http://host:port")
        if not url.isprintable():
            raise ValueError("must not contain control characters")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            raise ValueError("the port must be a number from 1 to 65535")
        _checked_host(parts.hostname)
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            raise ValueError("must be scheme, host and port only, without path, query or user")
        return url.rstrip("/")

    @model_validator(mode="before")
    @classmethod
    def _accepts_the_former_name(cls, document: Any) -> Any:
        if not isinstance(document, dict) or document.get("speed") is None:
            return document
        if "relative_cost" in document:
            raise ValueError("speed is the former name of relative_cost: remove it")
        return document | {"relative_cost": document["speed"]}

    @field_validator("kv_events", mode="before")
    @classmethod
    def _may_be_a_yaml_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads an unquoted `off` as false

    @field_validator("max_in_flight", "kv_cache_tokens")
    @classmethod
    def _is_positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if not self.name:
            object.__setattr__(self, "name", urlsplit(self.url).netloc)
        if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,128}", self.name):
            raise ValueError(f"name {self.name!r} may contain only letters, digits and . _ : -")
        return self


class RoutingConfig(Section):
    """How a backend is selected for a request."""

    policy: Literal["prefix", "least_loaded", "round_robin"] = Field(
        "prefix", description="prefix = lowest cost, considering cached prefixes; least_loaded; round_robin."
    )
    decode_weight: float = Field(
        1.0, ge=0, description="Cost weight of decoding: 0 = TTFT only, 1 = balanced, 5 = end-to-end latency."
    )
    prefill_window_seconds: Seconds | None = Field(
        None,
        description="Maximum prefill work queued on an engine; beyond it, requests wait here. null = 3600 x b, at"
        " least 0.02.",
    )
    seconds_per_prefill_token: float = Field(
        28e-6, gt=0, description="b: initial estimate of prefill time per uncached token; then learned."
    )
    aging: float = Field(0.05, ge=0, description="Cost credit, in seconds, per second that a request has waited.")
    index_capacity_factor: float = Field(
        1.0, gt=0, le=1000, description="Size of the own record of cached prefixes, in KV cache sizes."
    )
    index_memory_bytes: int = Field(
        536870912, gt=0, description="Maximum memory of the own records of all backends together."
    )
    scan: int = Field(32, ge=1, le=256, description="Maximum requests, oldest first, considered per queue scan.")
    starvation_seconds: Seconds = Field(
        30.0, description="Waiting time after which a request goes first, to any backend with capacity."
    )


class AdmissionConfig(Section):
    """Utilization of backends, queue limits and queue timeout."""

    kv_headroom: Fraction = Field(
        0.95, description="Share of a backend's KV cache that requests may reserve; lower it against preemption."
    )
    max_queued_requests: int = Field(4096, ge=0, description="Maximum queued requests; more get 429. 0 = no queue.")
    max_queued_bytes: int = Field(
        268435456, ge=0, description="Maximum total size of queued request bodies; further requests get 429."
    )
    max_wait_seconds: Seconds = Field(
        60.0, description="Queue timeout: then 429, or 503 if no backend can serve the model."
    )
    hold_without_backend: bool = Field(
        True, description="Queue requests while no backend can serve their model; false = 503 at once."
    )
    comment_seconds: float = Field(
        15.0,
        ge=0,
        le=_MOST_SECONDS,
        description="Interval of SSE comments to queued streams, against idle timeouts; 0 = none.",
    )
    tenant_header: str = Field(
        "",
        pattern=r"^([A-Za-z0-9-]{1,64})?$",
        description="Header that names the tenant, set by a trusted proxy; empty = by API key.",
    )
    adaptive: bool = Field(True, description="Lower a backend's limit of sequences in flight while it is overloaded.")
    itl_objective_seconds: Seconds | None = Field(
        None, description="Mean inter-token latency that counts as overload; null = none."
    )

    @field_validator("tenant_header")
    @classmethod
    def _has_no_meaning_already(cls, name: str) -> str:
        if name.lower() in _TAKEN_HEADERS:
            raise ValueError("this header is reserved; use another name")
        return name


class EmbeddingsConfig(Section):
    """Batching of embeddings requests across clients, and splitting of long lists."""

    coalesce: bool = Field(True, description="Batch requests, and split long lists; false = forward unchanged.")
    max_batch_items: int = Field(
        64, gt=0, description="Maximum inputs or documents in one batch; longer lists are split."
    )
    max_batch_tokens: int = Field(8192, gt=0, description="Maximum estimated tokens in one batch.")
    max_delay_seconds: float = Field(
        0.005, ge=0, le=_MOST_SECONDS, description="Maximum wait for more inputs while batches are in flight."
    )
    deduplicate: bool = Field(False, exclude=True, description="Deprecated: no effect. Version 0.3 will refuse it.")
    cache: bool = Field(True, description="Cache embedding vectors, up to `cache_bytes`.")
    cache_bytes: int = Field(0, ge=0, description="Memory for cached vectors of all models; 0 = no cache.")


class HealthConfig(Section):
    """Health probes, and ejection of failing backends."""

    probe_interval_seconds: Seconds = Field(2.0, description="Interval between health probes of a backend.")
    probe_timeout_seconds: Seconds = Field(2.0, description="Timeout of a health probe; then the probe has failed.")
    fall: int = Field(3, ge=1, description="Consecutive failed probes until a backend is down.")
    rise: int = Field(2, ge=1, description="Consecutive successful probes until a backend is up again.")
    eject_failures: int = Field(5, ge=1, description="Consecutive failed requests until a backend is ejected.")
    eject_base_seconds: Seconds = Field(5.0, description="Duration of the first ejection; doubles at each relapse.")
    eject_max_seconds: Seconds = Field(60.0, description="Maximum duration of an ejection.")
    max_ejected: Fraction = Field(0.5, description="Maximum share of a model's backends ejected at once.")
    slow_start_seconds: float = Field(
        30.0,
        ge=0,
        le=_MOST_SECONDS,
        description="Time over which a recovered backend's cap grows from a tenth to full.",
    )
    refresh_seconds: Seconds = Field(30.0, description="Interval of rereading a backend's models and version.")


class UpstreamConfig(Section):
    """Connections to backends, timeouts and retries."""

    connect_timeout_seconds: Seconds = Field(
        2.0, description="Timeout for connecting to a backend; then another one is tried."
    )
    first_byte_timeout_seconds: Seconds | None = Field(
        None, description="Timeout for the first byte of a response; then 504. null = none: long prompts take long."
    )
    idle_stream_timeout_seconds: Seconds = Field(
        300.0, description="Timeout between two pieces of a response; then it is interrupted."
    )
    keep_alive_seconds: Seconds = Field(
        3.0, description="Idle timeout of pooled connections; must be below the backend's own (vLLM: 5 s)."
    )
    max_connection_age_seconds: Seconds = Field(
        300.0, description="Maximum age of a pooled connection; older ones are replaced, to follow DNS changes."
    )
    retry_budget_fraction: Fraction = Field(0.1, description="Retries allowed per request served.")
    retry_budget_min: int = Field(10, ge=0, description="Retries allowed before any request was served.")


class KeyConfig(Section):
    """An API key that clients may use."""

    name: str = Field(min_length=1, max_length=64, description="Unique name in logs, metrics and reports.")
    key: str = Field("", description="API key in plain text; alternative to `key_sha256`.")
    key_sha256: str = Field(
        "", pattern=r"^([0-9a-f]{64})?$", description="SHA-256 of the API key in hex; alternative to `key`."
    )
    isolate_cache: bool = Field(
        False, description="Use a KV-cache salt of its own, to share no cached prefixes with other keys."
    )
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Relative share of tokens while other tenants also wait."
    )
    priority: Literal["interactive", "batch"] = Field(
        "interactive", description="batch = after queued interactive requests; a request header can lower the priority."
    )
    requests_per_minute: int | None = Field(
        None, gt=0, description="Maximum requests per minute; more get 429. null = unlimited."
    )
    tokens_per_minute: int | None = Field(
        None,
        gt=0,
        description="Maximum prompt and output tokens per minute, as estimated, later by usage; null = no limit.",
    )
    max_concurrent_requests: int | None = Field(
        None, gt=0, description="Maximum running and queued requests; more get 429. null = unlimited."
    )

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if bool(self.key) == bool(self.key_sha256):
            raise ValueError("set either key or key_sha256, not both")
        if self.digest in _NO_DIGESTS:
            raise ValueError(
                "key_sha256 is a placeholder (zeros or the digest of an empty string); set the digest of a key"
            )
        return self

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.key_sha256) or hashlib.sha256(self.key.encode()).digest()


class AuthConfig(Section):
    """Authentication of clients."""

    keys: tuple[KeyConfig, ...] = Field((), description="API keys of clients; empty = no authentication.")
    cache_salt_secret: str = Field(
        "", description="Secret from which all cache salts are derived, of isolate_cache too; empty = random at start."
    )

    @model_validator(mode="after")
    def _has_distinct_keys(self) -> Self:
        owners: dict[bytes, str] = {}
        for key in self.keys:
            if key.name in owners.values():
                raise ValueError(f"duplicate key name {key.name!r}; key names must be unique")
            if key.digest in owners:
                raise ValueError(f"{owners[key.digest]!r} and {key.name!r} are the same key; remove one of them")
            owners[key.digest] = key.name
        return self


class ModelEmbeddingsConfig(Section):
    """Batching of embeddings requests for one model."""

    coalesce: bool | None = Field(None, description="Overrides `embeddings.coalesce`; null = no override.")
    deduplicate: bool | None = Field(
        None, exclude=True, description="Deprecated: no effect. Version 0.3 will refuse it."
    )
    cache: bool | None = Field(None, description="Overrides `embeddings.cache`; null = no override.")


class ModelConfig(Section):
    """Settings of one model, by the name that backends use."""

    tokenizer: str = Field(
        "",
        description="Folder or Hugging Face name. Prompts are then tokenized here too, for exact prefix routing and"
        " exact token usage in embeddings batches.",
    )
    embeddings: ModelEmbeddingsConfig = Field(
        ModelEmbeddingsConfig(), description="Overrides of `embeddings` for this model."
    )


class ModelsConfig(Section):
    """Model aliases, and settings by model name."""

    model_config = ConfigDict(extra="allow")  # of the type below
    __pydantic_extra__: dict[str, ModelConfig] = Field(init=False)

    aliases: dict[str, str] = Field(
        default_factory=dict, description="Maps names that clients use to names that backends use."
    )

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

    enabled: bool = Field(True, description="Sample prompts (up to 512, 8 MiB) to find causes of cache misses.")
    show_text: bool = Field(False, description="Show excerpts of prompts; false = hashes, kinds and positions.")


class Config(Section):
    """The configuration file."""

    server: ServerConfig = ServerConfig()
    backends: tuple[BackendConfig, ...] = Field(min_length=1)
    routing: RoutingConfig = RoutingConfig()
    admission: AdmissionConfig = AdmissionConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()
    health: HealthConfig = HealthConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    auth: AuthConfig = AuthConfig()
    models: ModelsConfig = ModelsConfig()
    prefix_report: PrefixReportConfig = PrefixReportConfig()

    def embeds(self, how: Literal["coalesce", "cache"], model: str) -> bool:
        """The setting of this model's own section, or of the section for all models."""
        section = self.models.by_name.get(model)
        own = None if section is None else getattr(section.embeddings, how)
        return bool(getattr(self.embeddings, how) if own is None else own)

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
        names = [backend.name for backend in self.backends]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"duplicate backend name {twice[0]!r}; backend names must be unique")
        return self
