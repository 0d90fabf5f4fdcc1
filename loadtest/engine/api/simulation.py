"""/sim/*: what tests use to script faults and to read the ledger."""

from aiohttp import web
from pydantic import ValidationError

from loadtest.engine.api.errors import ApiError, engine_dead
from loadtest.engine.api.exchange import json_answer
from loadtest.engine.faults import ServerFaults
from loadtest.engine.ledger import Entry
from loadtest.engine.scheduler import Scheduler
from loadtest.engine.service import Service


async def ledger(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """GET: counts, peaks and entries. DELETE: forget them. Figures of the engine are sums over its ranks."""
    schedulers = [rank.scheduler for rank in service.engine.ranks]
    if request.method == "DELETE":
        service.ledger.clear()
        for scheduler in schedulers:
            scheduler.counters.peak_running = scheduler.num_running
            scheduler.counters.peak_used_blocks = scheduler.pool.num_used
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


async def faults(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
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


async def restart(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """Become a new process at the same ports: all other connections break, caches and counters are empty."""
    await service.restart(request)
    return json_answer({"started": service.started_unix_seconds})
