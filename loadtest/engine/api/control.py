"""Routes that must never be reachable from outside: they answer, so a test can see who got through."""

from aiohttp import web

from loadtest.engine.api.exchange import empty_answer, json_answer
from loadtest.engine.ledger import Entry
from loadtest.engine.service import Service


async def accept(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """Answer 200 and do nothing else; the ledger shows the visit."""
    return empty_answer()


async def reset_prefix_cache(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """Forget all cached prefixes of each rank on which no request holds one. KV events tell it after the next step."""
    service.engine.reset_prefix_cache()
    return empty_answer()


async def server_info(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """The configuration, `max_num_seqs` included."""
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
