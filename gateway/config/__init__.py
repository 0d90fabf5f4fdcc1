"""The configuration: its schema and its defaults."""

import re
from itertools import combinations
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from gateway.core.backends.settings import BackendConfig
from gateway.core.tls.contexts import ServerTls
from gateway.features.batches.settings import BatchesConfig
from gateway.features.coordination.settings import CoordinationConfig
from gateway.features.discovery.settings import DiscoveryConfig
from gateway.features.keys.settings import AuthConfig
from gateway.features.models.settings import ModelsConfig
from gateway.features.tracing.settings import TracingConfig
from gateway.settings import (
    Count,
    Fraction,
    HostName,
    ListenHost,
    Network,
    Origin,
    Seconds,
    SecondsOrZero,
    Secret,
    Section,
    check_installed,
    default,
    refuse,
    twice,
)

_TAKEN_HEADER = re.compile(
    "authorization|connection|content-(encoding|length|type)|expect|host|trace(parent|state)|transfer-encoding"
    "|x-(api-key|data-parallel-rank|request-id)"
)
SECRETS = (
    "api_key",
    "key",
    "key_sha256",
    "cache_salt_secret",
    "token",
    "password",
    "sentinel_password",
    "database",
)  # keys with secret values, which are never shown


def masked(value: Any, key: str = "") -> Any:
    """A plain value of this key as it may be shown: secrets in it as `***`, unless they are empty."""
    if isinstance(value, dict):
        return {name: masked(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [masked(each, key) for each in value]
    return "***" if key in SECRETS and value else value


class ConfigError(Exception):
    """The configuration is invalid; the message names the key and the reason."""


class Listen(Section):
    """Address to listen on."""

    host: ListenHost = default("127.0.0.1", "IP address or host name to listen on; empty = all interfaces.")
    port: int = default(8081, "TCP port to listen on; 0 = any free port.", ge=0, le=65535)
    allowed_hosts: tuple[HostName, ...] = default((), "Names accepted in `Host` besides `host`, localhost and IPs.")


class AdminConfig(Listen):
    """The admin port (/metrics, /livez, /readyz, /admin/*)."""

    token: Secret = default(
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
    workers: int = default(1, "Processes that serve this port, on as many cores; 1 = this process alone.", ge=1, le=64)
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
    max_buffered_upload_bytes: Count = default(
        27262976,
        "Maximum audio buffered until the form has named its model; else 400. OpenAI's limit of a file is 25 MB.",
    )
    memory_budget_bytes: Count = default(1073741824, "Memory for bodies, uploads, queue and responses; beyond it, 503.")
    max_json_depth: Count = default(64, "Maximum nesting depth of a JSON body; else 400.")
    max_json_containers: Count | None = default(
        None, "Maximum objects and arrays in a JSON body; else 400. null = one per 48 bytes of max_body_bytes."
    )
    max_json_strings: Count | None = default(
        None, "Maximum strings in a JSON body; else 400. null = one per 12 bytes of max_body_bytes."
    )
    max_json_values: Count | None = default(
        None, "Maximum values outside of lists of numbers; else 400. null = one per 16 bytes of max_body_bytes."
    )
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
    access_log: bool = default(True, "Write one line per request to standard output.")
    access_log_fields: tuple[Literal["tenant", "class", "address", "user_agent", "trace_id", "response_bytes"], ...] = (
        default((), "More fields of its lines: tenant, class, address, user_agent, trace_id, response_bytes.")
    )
    access_log_prefixes: bool = default(False, "Log salted hashes of prefix blocks, for `loadtest record`.")

    @model_validator(mode="after")
    def _has_ports_of_its_own(self) -> Self:
        ports = {"port": self, "admin.port": self.admin, "metrics.port": self.metrics}
        wrong = [
            f"{a} and {b} are both {first.port}: change one of them"
            for (a, first), (b, second) in combinations(ports.items(), 2)
            if first and second and first.port and first.port == second.port and _overlap(first.host, second.host)
        ]
        return refuse(self, wrong)

    @field_validator("workers")
    @classmethod
    def _can_meet(cls, workers: int) -> int:
        if workers > 1:
            check_installed("hiredis", "coordination")
        return workers


def _overlap(host: str, other: str) -> bool:
    """Whether two sockets with one port would claim the same address."""
    if host == other or not host or not other:
        return True
    return any(every in (host, other) and (":" in host) == (":" in other) for every in ("0.0.0.0", "::"))


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
    comment_seconds: SecondsOrZero = default(15.0, "Interval of keep-alive comments to silent streams; 0 = none.")
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


_BACKEND_KEEP_ALIVE_SECONDS = 5.0  # VLLM_HTTP_TIMEOUT_KEEP_ALIVE's default


class UpstreamConfig(Section):
    """Connections to backends, timeouts and retries."""

    connect_timeout_seconds: Seconds = default(2.0, "Timeout for connecting to a backend; then another one is tried.")
    first_byte_timeout_seconds: Seconds | None = default(
        None,
        "Timeout until a stream's first token, or the first byte of another response; then 504."
        " null = none while the backend is not down: long prompts take long.",
    )
    idle_stream_timeout_seconds: Seconds = default(
        300.0, "Timeout between tokens, or pieces of another response; then it is cut off."
    )
    background_timeout_seconds: Seconds = default(
        3600.0, "Maximum time that a response with `background: true` holds its slots after its answer."
    )
    keep_alive_seconds: Seconds = default(3.0, "Idle timeout of pooled connections; below the backend's (vLLM: 5 s).")
    max_connection_age_seconds: Seconds = default(300.0, "Maximum age of pooled connections, to follow DNS changes.")
    retry_budget_fraction: Fraction = default(0.1, "Retries allowed per request served.")
    retry_budget_min: int = default(10, "Retries allowed before any request was served.", ge=0)

    @property
    def warnings(self) -> list[str]:
        """Warnings about a valid configuration with which requests fail."""
        if self.keep_alive_seconds < _BACKEND_KEEP_ALIVE_SECONDS:
            return []
        return [
            f"upstream.keep_alive_seconds is {self.keep_alive_seconds:g}, but vLLM closes connections that are idle for"
            f" {_BACKEND_KEEP_ALIVE_SECONDS:g} s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE): requests may fail."
        ]


class RealtimeConfig(Section):
    """Sessions of the realtime API (WebSocket). Each holds a slot of a backend while it is open."""

    idle_timeout_seconds: Seconds = default(300.0, "Timeout without data in either direction; then it is closed.")
    max_session_seconds: Seconds = default(3600.0, "Maximum duration of a session; then it is closed.")


class PrefixReportConfig(Section):
    """The report on prefix reuse and cache misses at /admin/prefixes."""

    enabled: bool = default(True, "Sample prompts (up to 512, 8 MiB) to find causes of cache misses.")
    show_text: bool = default(False, "Show excerpts of prompts; false = hashes, kinds and positions.")


class LogConfig(Section):
    """The event log on standard error, and the access log on standard output."""

    level: Literal["debug", "info", "warning", "error"] = default("info", "Lowest level of events that are logged.")
    format: Literal["auto", "json", "console"] = default(
        "auto", "json = an object per line; console = lines for people; auto = console on a terminal, else json."
    )


class StateConfig(Section):
    """Learned state, kept on disk for the gateway's next start."""

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
    batches: BatchesConfig = BatchesConfig()
    coordination: CoordinationConfig = CoordinationConfig()
    health: HealthConfig = HealthConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    realtime: RealtimeConfig = RealtimeConfig()
    auth: AuthConfig = AuthConfig()
    models: ModelsConfig = ModelsConfig()
    prefix_report: PrefixReportConfig = PrefixReportConfig()
    log: LogConfig = LogConfig()
    state: StateConfig = StateConfig()
    tracing: TracingConfig = TracingConfig()

    def coalesces(self, model: str) -> bool:
        """The setting of this model's own section, or of the section for all models."""
        section = self.models.by_name.get(model)
        own = None if section is None else section.embeddings.coalesce
        return self.embeddings.coalesce if own is None else own

    @property
    def named_models(self) -> frozenset[str]:
        """Models that the configuration names: backends are expected to have them."""
        return self.models.named

    @model_validator(mode="after")
    def _has_distinct_backends(self) -> Self:
        found, names = self.discovery, (backend.name for backend in self.backends)
        wrong = [f"duplicate backend name {name!r}; backend names must be unique" for name in twice(names)]
        if not (self.backends or found.file or found.dns or found.kubernetes):
            wrong.append("no backends: pass --backend http://host:8000 (repeatable) or list them in a file")
        wrong += [  # of discovered backends, one setting is for all, and some may be http
            f"{each.name} has tls, which is for https, and its url is {each.url}"
            for each in self.backends
            if each.tls is not None and not each.url.startswith("https://")
        ]
        return refuse(self, wrong)
