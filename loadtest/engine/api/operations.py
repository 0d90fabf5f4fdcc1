"""Health, version, models, load, metrics, event sources, tokenization, and /sim/* for tests.

Also routes that must never be reachable from outside: they answer, so that a test can see what got through.
"""

import asyncio
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError

from loadtest.engine.api.errors import ApiError, engine_dead, invalid, missing
from loadtest.engine.api.exchange import (
    COMMON_HEADERS,
    empty_answer,
    json_answer,
    read_json,
    read_messages,
    read_token_ids,
)
from loadtest.engine.faults import ServerFaults
from loadtest.engine.ledger import LedgerEntry
from loadtest.engine.metrics import render
from loadtest.engine.scheduler import Scheduler
from loadtest.engine.service import Service
from loadtest.engine.tokens import from_ids, render_chat, tokenise


async def health(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """200 with no body; 503 only if the engine is dead and the server knows."""
    faults = service.faults.current
    await asyncio.sleep(faults.health_delay_seconds)
    return empty_answer(faults.health_status or 200)


async def version(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    return json_answer({"version": service.config.version})


async def load(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    return json_answer({"server_load": service.server_load})


async def kv_event_sources(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """Where KV events are published, by data-parallel rank; empty if nowhere."""
    return json_answer({} if service.kv_events is None else service.kv_events.sources())


async def models(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """The served model and its adapters."""
    status = service.faults.current.models_status
    if status is not None:
        raise ApiError(status, "scripted failure", "InternalServerError")
    base = service.served_model
    cards = [_card(service, base, base, parent=None, max_model_len=service.config.max_model_len)]
    cards += [_card(service, name, f"/adapters/{name}", parent=base, max_model_len=None) for name in service.adapters]
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


async def metrics(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
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


async def accept(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """Answer 200 and do nothing else; the ledger shows the visit."""
    return empty_answer()


async def sleep(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """Forget the KV cache, and refuse requests until /wake_up."""
    service.is_asleep = True
    service.engine.reset_prefix_cache()
    return empty_answer()


async def load_lora_adapter(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """Serve one more adapter, by the name in the body."""
    body = await read_json(request)
    service.loaded_adapters.append(str(body.get("lora_name")))
    return empty_answer()


async def wake_up(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """Take requests again; the cache stays empty."""
    service.is_asleep = False
    return empty_answer()


async def is_sleeping(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """Whether /sleep was called, and not /wake_up since."""
    return json_answer({"is_sleeping": service.is_asleep})


async def reset_prefix_cache(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """Forget all cached prefixes of each rank without requests that use one. KV events report it after a step."""
    service.engine.reset_prefix_cache()
    return empty_answer()


async def server_info(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
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


async def ledger(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """GET: counts, peaks and entries. DELETE: forget them. Figures of the engine are sums over its ranks."""
    schedulers = [rank.scheduler for rank in service.engine.ranks]
    if request.method == "DELETE":
        service.ledger.clear()
        for scheduler in schedulers:
            scheduler.counters.restart_peaks(scheduler.num_running, scheduler.pool.num_used)
    ranks = [_figures(scheduler) for scheduler in schedulers]
    totals = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    return json_answer({**service.ledger.as_json(), **totals, "ranks": ranks})


def _figures(scheduler: Scheduler) -> dict[str, int]:
    return {
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "used_blocks": scheduler.pool.num_used,
        "cached_blocks": scheduler.pool.num_cached,
        "peak_running": scheduler.counters.peak_running,
        "peak_used_blocks": scheduler.counters.peak_used_blocks,
    }


async def faults(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """GET: the faults in force. POST: replace them. DELETE: none."""
    if request.method == "POST":
        try:
            set_faults(service, ServerFaults.model_validate_json(await request.read()))
        except ValidationError as problem:
            raise ApiError(400, str(problem)) from None
    elif request.method == "DELETE":
        set_faults(service, ServerFaults())
    return json_answer(service.faults.current.model_dump())


def set_faults(service: Service, wanted: ServerFaults) -> None:
    """Put faults into force; a dead engine fails the requests that it has."""
    if service.kv_events is None and (wanted.kv_events_drop_batches or wanted.kv_events_hang):
        raise ApiError(400, "this engine publishes no KV events")
    service.faults.replace(wanted)
    service.engine.pause(wanted.engine_paused or wanted.engine_dead)
    if wanted.engine_dead:
        service.engine.fail_all(engine_dead())
    if service.kv_events is not None:
        for publisher in service.kv_events.by_rank:
            publisher.drop_next(wanted.kv_events_drop_batches)
            publisher.hang(wanted.kv_events_hang)


async def restart(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """Become a new process at the same ports: all other connections break, caches and counters are empty."""
    await service.restart(request)
    return json_answer({"started": service.started_unix_seconds})


async def tokenize(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """The tokens of a text or of a chat."""
    body = await read_json(request)
    service.check_model(body.get("model"))
    if body.get("messages") is not None:
        text = render_chat(read_messages(body), bool(body.get("add_generation_prompt", True)))
    elif isinstance(body.get("prompt"), str):
        text = body["prompt"]
    elif body.get("prompt") is None:
        raise missing("prompt", body)
    else:
        raise invalid("body.prompt", "string_type", "Input should be a valid string", body["prompt"])
    ids = tokenise(text).ids()
    strings: list[str] | None = None
    if body.get("return_token_strs"):
        strings = [from_ids([token]).text() for token in ids]
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.config.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    return json_answer(answer)


async def detokenize(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    body = await read_json(request)
    service.check_model(body.get("model"))
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise missing("tokens", body)
    return json_answer({"prompt": from_ids(read_token_ids(tokens)).text()})
