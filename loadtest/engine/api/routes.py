"""The table of routes: path -> method -> handler."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from aiohttp import web

from loadtest.engine.api import operations, simulation
from loadtest.engine.api.audio import transcribe
from loadtest.engine.api.chat import chat_completions
from loadtest.engine.api.completions import completions
from loadtest.engine.api.embeddings import classify, embeddings, pooling
from loadtest.engine.api.messages import count_tokens, messages
from loadtest.engine.api.responses import cancel_response, create_response, get_response
from loadtest.engine.api.scoring import rerank, score
from loadtest.engine.api.tokenization import detokenize, tokenize
from loadtest.engine.config import EngineConfig
from loadtest.engine.ledger import Entry
from loadtest.engine.service import Service

Handler: TypeAlias = Callable[[Service, web.BaseRequest, Entry], Awaitable[web.StreamResponse]]
Routes: TypeAlias = Mapping[str, Mapping[str, Handler]]

_OPERATIONS: Routes = {
    "/health": {"GET": operations.health},
    "/ping": {"GET": operations.health, "POST": operations.health},
    "/version": {"GET": operations.version},
    "/load": {"GET": operations.load},
    "/metrics": {"GET": operations.metrics},
    "/v1/models": {"GET": operations.models},
    "/kv_event_sources": {"GET": operations.kv_event_sources},
    "/tokenize": {"POST": tokenize},
    "/detokenize": {"POST": detokenize},
}
_GENERATION: Routes = {
    "/v1/chat/completions": {"POST": chat_completions},
    "/v1/completions": {"POST": completions},
    "/v1/responses": {"POST": create_response},
    "/v1/responses/{response_id}": {"GET": get_response},
    "/v1/responses/{response_id}/cancel": {"POST": cancel_response},
    "/v1/messages": {"POST": messages},
    "/v1/messages/count_tokens": {"POST": count_tokens},
    "/v1/audio/transcriptions": {"POST": transcribe},
    "/v1/audio/translations": {"POST": transcribe},
}
_POOLING: Routes = {
    "/v1/embeddings": {"POST": embeddings},
    "/pooling": {"POST": pooling},
    "/classify": {"POST": classify},
    **{path: {"POST": score} for path in ("/score", "/v1/score")},
    **{path: {"POST": rerank} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
}
_SIMULATION: Routes = {
    "/sim/ledger": {"GET": simulation.ledger, "DELETE": simulation.ledger},
    "/sim/restart": {"POST": simulation.restart},
    "/sim/faults": {"GET": simulation.faults, "POST": simulation.faults, "DELETE": simulation.faults},
}
_DANGEROUS = (
    "/sleep",
    "/wake_up",
    "/pause",
    "/resume",
    "/collective_rpc",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/release_kv_cache_memory",
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/inference/v1/generate",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/fault_tolerance/apply",
    "/start_profile",
    "/stop_profile",
    "/invocations",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/init_weight_transfer_engine",
    "/update_weights",
)
_DEV_MODE: Routes = {
    **{path: {"POST": operations.accept} for path in _DANGEROUS},
    "/reset_prefix_cache": {"POST": operations.reset_prefix_cache},
    "/server_info": {"GET": operations.server_info},
    "/is_sleeping": {"GET": operations.accept},
    "/is_paused": {"GET": operations.accept},
    "/tokenizer_info": {"GET": operations.accept},
    "/docs": {"GET": operations.accept},
    "/openapi.json": {"GET": operations.accept},
}
# What is asked for every second or so, by whoever watches an engine.
PROBES = frozenset({"/health", "/ping", "/version", "/load", "/metrics", "/v1/models", "/kv_event_sources"})
# Requests that count as load and that scripts apply to.
INFERENCE = frozenset({*_GENERATION, *_POOLING})


def routes(config: EngineConfig) -> Routes:
    """The routes of an engine with that configuration."""
    table: dict[str, Mapping[str, Handler]] = dict(_OPERATIONS)
    table.update(_POOLING if config.embedding else _GENERATION)
    if config.dev_mode or config.control:
        table.update(_DEV_MODE)
    if config.control:
        table.update(_SIMULATION)
    return MappingProxyType(table)
