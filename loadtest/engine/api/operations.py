"""What operators and load balancers ask: health, version, models, load, metrics, event sources.

At the end, routes that must never be reachable from outside: they answer, so a test can see what got through.
"""

import asyncio
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from loadtest.engine.api.errors import ApiError
from loadtest.engine.api.exchange import COMMON_HEADERS, empty_answer, json_answer
from loadtest.engine.ledger import Entry
from loadtest.engine.metrics import render
from loadtest.engine.service import Service


async def health(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """200 with no body; 503 only if the engine is dead and the server knows."""
    faults = service.faults.current
    await asyncio.sleep(faults.health_delay_seconds)
    return empty_answer(faults.health_status or 200)


async def version(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    return json_answer({"version": service.config.version})


async def load(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    return json_answer({"server_load": service.server_load})


async def kv_event_sources(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """Where KV events are published, by data-parallel rank; empty if nowhere."""
    return json_answer({} if service.kv_events is None else service.kv_events.sources())


async def models(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """The served model and its adapters."""
    status = service.faults.current.models_status
    if status is not None:
        raise ApiError(status, "scripted failure", "InternalServerError")
    base = service.served_model
    cards = [_card(service, base, base, None, service.config.max_model_len)]
    cards += [_card(service, name, f"/adapters/{name}", base, None) for name in service.config.lora_adapters]
    return json_answer({"object": "list", "data": cards})


def _card(service: Service, name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    created = service.created()
    permission = {
        "id": f"modelperm-{service.new_id()}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


async def metrics(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    faults = service.faults.current
    await asyncio.sleep(faults.metrics_delay_seconds)
    if faults.metrics_status is not None:
        raise ApiError(faults.metrics_status, "scripted failure", "InternalServerError")
    headers = {**COMMON_HEADERS, "Content-Type": CONTENT_TYPE_LATEST}
    if faults.metrics_garbage:
        return web.Response(body=b"vllm:num_requests_running{ \xff\x00 not a number\n}}}{\n" * 20, headers=headers)
    page = render(service)
    if faults.metrics_bytes <= len(page):
        return web.Response(body=page, headers=headers)
    return await _huge_page(request, page, faults.metrics_bytes, headers)


async def _huge_page(
    request: web.BaseRequest, page: bytes, total_bytes: int, headers: dict[str, str]
) -> web.StreamResponse:
    """A valid page that goes on and on."""
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    await response.write(page)
    filler = b"".join(b'filler_total{line="%d"} %d\n' % (i, i) for i in range(2000))
    sent = len(page)
    while sent < total_bytes:
        await response.write(filler)
        sent += len(filler)
    await response.write_eof()
    return response


async def accept(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """Answer 200 and do nothing else; the ledger shows the visit."""
    return empty_answer()


async def reset_prefix_cache(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """Forget all cached prefixes of each rank on which no request holds one. KV events tell it after the next step."""
    service.engine.reset_prefix_cache()
    return empty_answer()


async def server_info(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    limits = service.config.limits
    scheduler = {
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "policy": "fcfs",
    }
    cache = {"block_size": limits.block_size, "num_gpu_blocks": limits.num_blocks}
    parallel = {"data_parallel_size": service.config.data_parallel_size}
    configs = {"scheduler_config": scheduler, "cache_config": cache, "parallel_config": parallel}
    return json_answer({"vllm_config": configs, "vllm_env": {}})
