"""The configuration: its schema and its defaults."""

import hashlib
import re
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.complaints import complaints

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
    """The configuration cannot be used; the message says where and why."""


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
    """An address to listen on."""

    host: ListenHost = "127.0.0.1"
    port: int = Field(8081, ge=0, le=65535, description="0 picks a free port.")
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Names accepted in `Host` beside IP addresses, localhost and `host`.",
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_checked_host(name).lower().removesuffix(".") for name in names)


class ServerConfig(Section):
    """The main port, its limits and its timeouts."""

    host: ListenHost = "0.0.0.0"
    port: int = Field(8080, ge=0, le=65535, description="0 picks a free port.")
    admin: Listen | None = Field(Listen(), description="Where /metrics and /admin/* are served; null turns it off.")
    max_connections: int = Field(16384, gt=0, description="Client connections; more are closed at once.")
    max_body_bytes: int = Field(
        8388608,
        gt=0,
        description="Larger request bodies get 413. 8 MiB stop the event loop for 40 ms at most.",
    )
    max_upload_bytes: int = Field(536870912, gt=0, description="The same for audio uploads, which are streamed.")
    memory_budget_bytes: int = Field(
        1073741824, gt=0, description="Request bodies, uploads, queued requests and collected answers together."
    )
    max_json_depth: int = Field(64, gt=0, description="Deeper nesting gets 400.")
    max_json_containers: int = Field(16384, gt=0, description="More objects and arrays in one body get 400.")
    max_json_strings: int = Field(65536, gt=0, description="More strings in one body get 400.")
    max_json_values: int = Field(262144, gt=0, description="More values in one body get 400.")
    allow_media_urls: bool = Field(False, description="Let requests name images, sounds and videos by http(s) URL.")
    max_sequences: int = Field(1024, gt=0, description="Most sequences (n x prompts) that one request may ask for.")
    header_timeout_seconds: Seconds = Field(10.0, description="From a request's first byte to the end of its head.")
    body_timeout_seconds: Seconds = Field(300.0, description="From the end of a request's head to that of its body.")
    body_grace_seconds: Seconds = Field(5.0, description="The window over which the rate of a body is measured.")
    body_min_bytes_per_second: float = Field(1024.0, gt=0, description="A body slower than this is cut with 408.")
    keep_alive_seconds: Seconds = Field(75.0, description="An idle client connection is closed after this.")
    write_stall_seconds: Seconds = Field(60.0, description="A client that takes nothing for this long is dropped.")
    drain_delay_seconds: float = Field(
        5.0, ge=0, le=_MOST_SECONDS, description="After SIGTERM: not ready, but still accepting."
    )
    drain_timeout_seconds: float = Field(
        600.0, ge=0, le=_MOST_SECONDS, description="Then running requests may take this long to end."
    )
    response_headers: bool = Field(True, description="Send the x-gateway-* response headers.")
    access_log: bool = Field(True, description="One JSON line a request on standard output.")
    access_log_prefixes: bool = Field(False, description="With salted hashes of prefix blocks, for `loadtest record`.")


class KvEventsConfig(Section):
    """Where a backend's KV events are read; rank r of a data-parallel backend uses ports r above these."""

    endpoint: str = Field(description="tcp://host:port of the publisher; * stands for the backend's host.")
    replay: str | None = Field(None, description="tcp://host:port where missed events can be asked for.")
    topic: str | None = Field(None, description="Only messages with this topic; null = all.")
    bind: bool = Field(False, description="Listen at `endpoint`, for publishers that connect.")

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

    url: str
    name: str = Field("", description="Default: host:port.")
    api_key: str = Field("", pattern=r"^[!-~]*$", description="Sent to the backend; a client's key never is.")
    max_in_flight: int | Literal["auto"] = Field("auto", description="Sequences; auto = discovered, else learned.")
    kv_cache_tokens: int | Literal["auto"] = Field("auto", description="auto = kv_cache_size_tokens of /metrics.")
    kv_events: Literal["auto", "off"] | KvEventsConfig = Field(
        "auto", description="auto, the default: read where /kv_event_sources says, at the backend's own host."
    )
    speed: float = Field(1.0, gt=0, description="Relative time for the same work: 2 = half as fast as the others.")

    @field_validator("url")
    @classmethod
    def _is_an_origin(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must look like http://host:port")
        if not url.isprintable():
            raise ValueError("must hold no control characters")
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
            raise ValueError(f"name {self.name!r} may hold letters, digits and . _ : - only")
        return self


class RoutingConfig(Section):
    """Which backend a request is sent to."""

    policy: Literal["prefix", "least_loaded", "round_robin"] = "prefix"
    decode_weight: float = Field(1.0, ge=0, description="0 = TTFT alone, 1 = balanced, 5 = end-to-end latency.")
    prefill_window_seconds: Seconds | None = Field(
        None, description="A backend with more prefill than this ahead is not open; null = 3600 x b, at least 0.02."
    )
    seconds_per_prefill_token: float = Field(28e-6, gt=0, description="b: where learning starts.")
    aging: float = Field(0.05, ge=0, description="Seconds of cost that one second of waiting is worth.")
    index_capacity_factor: float = Field(1.0, gt=0, le=1000, description="Size of the own record, in KV caches.")
    index_memory_bytes: int = Field(536870912, gt=0, description="Most memory of all own records together.")
    scan: int = Field(32, ge=1, le=256, description="Oldest waiting requests looked at in one pass.")
    starvation_seconds: Seconds = Field(30.0, description="After this wait a request takes any open backend, first.")


class AdmissionConfig(Section):
    """How far backends are filled, how much may wait, and for how long."""

    kv_headroom: Fraction = Field(0.95, description="Share of a backend's KV cache that may be reserved.")
    max_queued_requests: int = Field(4096, ge=0)
    max_queued_bytes: int = Field(268435456, ge=0)
    max_wait_seconds: Seconds = 60.0
    hold_without_backend: bool = Field(
        True, description="While no backend of a model can serve, its requests wait for one; false: 503 at once."
    )
    comment_seconds: float = Field(
        15.0,
        ge=0,
        le=_MOST_SECONDS,
        description="A stream that waits gets an SSE comment this often, against idle time-outs; 0 = none.",
    )
    tenant_header: str = Field(
        "",
        pattern=r"^([A-Za-z0-9-]{1,64})?$",
        description="Header that names the tenant, where a proxy in front sets it; empty = the API key does.",
    )
    adaptive: bool = Field(True, description="Send a backend fewer at once while it shows signs of overload.")
    itl_objective_seconds: Seconds | None = Field(None, description="A longer mean ITL is such a sign; null = none is.")

    @field_validator("tenant_header")
    @classmethod
    def _has_no_meaning_already(cls, name: str) -> str:
        if name.lower() in _TAKEN_HEADERS:
            raise ValueError("this header means something else already")
        return name


class EmbeddingsConfig(Section):
    """How embeddings requests of different clients are put together, and long lists cut."""

    coalesce: bool = Field(True, description="Put requests together, and cut long lists; false: each as it came.")
    max_batch_items: int = Field(64, gt=0, description="Most inputs or documents of one batch; longer lists are cut.")
    max_batch_tokens: int = Field(8192, gt=0, description="Most tokens of one batch, as estimated.")
    max_delay_seconds: float = Field(
        0.005, ge=0, le=_MOST_SECONDS, description="Longest wait for others while batches are under way."
    )
    deduplicate: bool = Field(False, exclude=True, description="Deprecated: no effect. Version 0.3 will refuse it.")
    cache: bool = Field(True, description="Cache embeddings, within `cache_bytes`.")
    cache_bytes: int = Field(0, ge=0, description="Memory for cached embeddings of all models; 0 = no cache.")


class HealthConfig(Section):
    """When a backend counts as up, and how a failing one is kept away."""

    probe_interval_seconds: Seconds = 2.0
    probe_timeout_seconds: Seconds = 2.0
    fall: int = Field(3, ge=1, description="Failed probes in a row that take a backend down.")
    rise: int = Field(2, ge=1, description="Good probes in a row that bring it back.")
    eject_failures: int = Field(5, ge=1, description="Failed requests in a row that eject a backend.")
    eject_base_seconds: Seconds = 5.0
    eject_max_seconds: Seconds = 60.0
    max_ejected: Fraction = Field(0.5, description="Never more than this share of a model's backends is ejected.")
    slow_start_seconds: float = Field(
        30.0, ge=0, le=_MOST_SECONDS, description="A returned backend's cap grows from a tenth over this."
    )
    refresh_seconds: Seconds = Field(30.0, description="How often models and version are read again.")


class UpstreamConfig(Section):
    """Connections to the backends, and what is tried again."""

    connect_timeout_seconds: Seconds = 2.0
    first_byte_timeout_seconds: Seconds | None = Field(None, description="null = never: long prompts take long.")
    idle_stream_timeout_seconds: Seconds = 300.0
    keep_alive_seconds: Seconds = Field(3.0, description="Must be below the backend's own (vLLM: 5 s).")
    max_connection_age_seconds: Seconds = 300.0
    retry_budget_fraction: Fraction = Field(0.1, description="Retries allowed per request served.")
    retry_budget_min: int = Field(10, ge=0, description="Retries allowed before any request was served.")


class KeyConfig(Section):
    """An API key that clients may use."""

    name: str = Field(min_length=1, max_length=64)
    key: str = Field("", description="The key itself, or give its digest.")
    key_sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$", description="Hex SHA-256 of the key.")
    isolate_cache: bool = Field(False, description="Give this key a KV-cache salt of its own.")
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Its share of the engines while others wait too, by tokens."
    )
    priority: Literal["interactive", "batch"] = Field(
        "interactive", description="batch waits while interactive requests do; a request may lower itself by a header."
    )
    requests_per_minute: int | None = Field(None, gt=0, description="More get 429; null = any number.")
    tokens_per_minute: int | None = Field(
        None, gt=0, description="Prompt and answer together, by what is expected and then by usage; null = any number."
    )
    max_concurrent_requests: int | None = Field(
        None, gt=0, description="Running and waiting ones together; null = any number."
    )

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if bool(self.key) == bool(self.key_sha256):
            raise ValueError("give either key or key_sha256")
        if self.digest in _NO_DIGESTS:
            raise ValueError("key_sha256 is not the digest of a key, but all zeros or the digest of nothing")
        return self

    @property
    def digest(self) -> bytes:
        """The key's SHA-256."""
        return bytes.fromhex(self.key_sha256) or hashlib.sha256(self.key.encode()).digest()


class AuthConfig(Section):
    """Who may use the gateway."""

    keys: tuple[KeyConfig, ...] = Field((), description="Empty = open to everybody.")
    cache_salt_secret: str = Field("", description="Makes all salts, of isolate_cache too; empty = new at every start.")

    @model_validator(mode="after")
    def _has_distinct_keys(self) -> Self:
        owners: dict[bytes, str] = {}
        for key in self.keys:
            if key.name in owners.values():
                raise ValueError(f"two keys are called {key.name!r}; give them different names")
            if key.digest in owners:
                raise ValueError(f"{owners[key.digest]!r} and {key.name!r} are the same key; remove one of them")
            owners[key.digest] = key.name
        return self


class ModelEmbeddingsConfig(Section):
    """How embeddings requests for one model are put together."""

    coalesce: bool | None = Field(None, description="null = as `embeddings.coalesce` says.")
    deduplicate: bool | None = Field(
        None, exclude=True, description="Deprecated: no effect. Version 0.3 will refuse it."
    )
    cache: bool | None = Field(None, description="null = as `embeddings.cache` says.")


class ModelConfig(Section):
    """One model, under the name that backends use for it."""

    tokenizer: str = Field(
        "",
        description="Folder or hub name: prompts are tokenized here too, so cached prefixes, and whose the tokens of a"
        " batch of embeddings are, are known exactly.",
    )
    embeddings: ModelEmbeddingsConfig = ModelEmbeddingsConfig()


class ModelsConfig(Section):
    """Names of models, and by name what is to be known of a model."""

    model_config = ConfigDict(extra="allow")  # of the type below
    __pydantic_extra__: dict[str, ModelConfig] = Field(init=False)

    aliases: dict[str, str] = Field(default_factory=dict, description="Name that clients use: name that backends use.")

    @model_validator(mode="after")
    def _has_no_section_for_an_alias(self) -> Self:
        if wrong := sorted(self.by_name.keys() & self.aliases.keys()):
            raise ValueError(f"{wrong[0]!r} is an alias; write its section for {self.aliases[wrong[0]]!r}")
        return self

    @property
    def by_name(self) -> dict[str, ModelConfig]:
        """The sections of single models."""
        return self.__pydantic_extra__ or {}


class PrefixReportConfig(Section):
    """What /admin/prefixes tells of prompts, and of what keeps caches cold."""

    enabled: bool = Field(True, description="Keep some prompts in memory (512, 8 MiB at most) to look for causes in.")
    show_text: bool = Field(False, description="Show pieces of prompts in the report; else hashes, kinds and places.")


class Config(Section):
    """The whole file."""

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
        """Whether embeddings of this model are treated so: as its own section says, or that of all."""
        section = self.models.by_name.get(model)
        told = None if section is None else getattr(section.embeddings, how)
        return bool(getattr(self.embeddings, how) if told is None else told)

    @property
    def without_effect(self) -> list[str]:
        """Deprecated keys that the file sets."""
        sections: dict[str, EmbeddingsConfig | ModelEmbeddingsConfig] = {"embeddings": self.embeddings}
        sections |= {f"models.{name}.embeddings": model.embeddings for name, model in self.models.by_name.items()}
        return [f"{at}.deduplicate" for at, section in sections.items() if "deduplicate" in section.model_fields_set]

    @model_validator(mode="after")
    def _has_distinct_backends(self) -> Self:
        names = [backend.name for backend in self.backends]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two backends are called {twice[0]!r}; give them different names")
        return self


def parse(document: Any) -> Config:
    """Check a parsed document. Raises ConfigError with one line for each thing that is wrong."""
    if not isinstance(document, dict):
        raise ConfigError("the configuration must be a mapping with a key `backends`")
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(complaints(error))) from error
