"""The table of routes: (path) -> methods -> handler."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from aiohttp import web

from loadtest.engine.api import control, operations, simulation
from loadtest.engine.api.chat import chat_completions
from loadtest.engine.api.completions import completions
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
}
_GENERATION: Routes = {
    "/v1/chat/completions": {"POST": chat_completions},
    "/v1/completions": {"POST": completions},
}
_SIMULATION: Routes = {
    "/sim/ledger": {"GET": simulation.ledger, "DELETE": simulation.ledger},
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
_CONTROL: Routes = {
    **{path: {"POST": control.accept} for path in _DANGEROUS},
    "/reset_prefix_cache": {"POST": control.reset_prefix_cache},
    "/server_info": {"GET": control.server_info},
    "/is_sleeping": {"GET": control.accept},
    "/is_paused": {"GET": control.accept},
    "/tokenizer_info": {"GET": control.accept},
    "/docs": {"GET": control.accept},
    "/openapi.json": {"GET": control.accept},
}
# Requests that count as load and that scripts apply to.
INFERENCE = frozenset(_GENERATION)


def routes(config: EngineConfig) -> Routes:
    """The routes of an engine with that configuration."""
    table: dict[str, Mapping[str, Handler]] = {**_OPERATIONS, **_CONTROL, **_GENERATION}
    if config.control:
        table.update(_SIMULATION)
    return MappingProxyType(table)
