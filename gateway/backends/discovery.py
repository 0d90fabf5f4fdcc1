"""What a backend's JSON answers say of it. Pure; whatever has another shape than vLLM's raises ValueError."""

from dataclasses import replace
from typing import Any

from gateway.backends.backend import Facts, KvEventSource, ModelCard

MODELS_PATH = "/v1/models"
VERSION_PATH = "/version"
KV_EVENT_SOURCES_PATH = "/kv_event_sources"
SERVER_INFO_PATH = "/server_info?config_format=json"  # 404 unless the server runs in development mode

MAX_MODELS = 10000


def read_models(document: Any) -> tuple[ModelCard, ...]:
    """The entries of /v1/models."""
    entries = _mapping(document, "models").get("data")
    if not isinstance(entries, list) or len(entries) > MAX_MODELS:
        raise ValueError("the list of models is missing or too long")
    return tuple(_card(_mapping(entry, "model")) for entry in entries)


def read_version(document: Any) -> str:
    """The version that /version tells."""
    version = _mapping(document, "version").get("version")
    if not isinstance(version, str):
        raise ValueError("the version is missing")
    return version[:64]


def read_kv_event_sources(document: Any) -> tuple[KvEventSource, ...]:
    """The publishers of /kv_event_sources, by data-parallel rank; empty where KV events are off."""
    sources = []
    for rank, source in sorted(_mapping(document, "KV event sources").items()):
        settings = _mapping(source, "KV event source")
        if not rank.isascii() or not rank.isdigit():
            raise ValueError("a KV event source has no rank")
        if settings.get("enable_kv_cache_events"):
            publisher, endpoint = _text(settings, "publisher"), _text(settings, "endpoint")
            replay_endpoint, topic = _text(settings, "replay_endpoint"), _text(settings, "topic") or ""
            sources.append(KvEventSource(int(rank), publisher, endpoint, replay_endpoint, topic))
    return tuple(sources)


def read_max_num_seqs(document: Any) -> int:
    """The scheduler's max_num_seqs of /server_info."""
    config = _mapping(_mapping(document, "server info").get("vllm_config"), "vLLM configuration")
    number = _mapping(config.get("scheduler_config"), "scheduler configuration").get("max_num_seqs")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError("max_num_seqs is missing")
    return number


def with_models(facts: Facts, document: Any) -> Facts:
    """The facts with what /v1/models answered."""
    return replace(facts, models=read_models(document))


def with_version(facts: Facts, document: Any) -> Facts:
    """The facts with what /version answered."""
    return replace(facts, version=read_version(document))


def with_kv_event_sources(facts: Facts, document: Any) -> Facts:
    """The facts with what /kv_event_sources answered."""
    return replace(facts, kv_event_sources=read_kv_event_sources(document))


def with_server_info(facts: Facts, document: Any) -> Facts:
    """The facts with what /server_info answered: that it answers shows that the development endpoints are on."""
    return replace(facts, max_num_seqs=read_max_num_seqs(document), can_admin=True)


def without_server_info(facts: Facts) -> Facts:
    """The facts without what only /server_info can tell."""
    return replace(facts, max_num_seqs=None, can_admin=False)


def _card(entry: dict[str, Any]) -> ModelCard:
    name, length = entry.get("id"), entry.get("max_model_len")
    if not isinstance(name, str) or not name:
        raise ValueError("a model has no id")
    if not isinstance(length, int):
        length = None
    return ModelCard(name, _text(entry, "root"), _text(entry, "parent"), length, entry)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"the {what} is not a JSON object")
    return value


def _text(entry: dict[str, Any], key: str) -> str | None:
    value = entry.get(key)
    return value if isinstance(value, str) else None
