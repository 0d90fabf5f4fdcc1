"""/sim/*: what tests use to script faults and to read the ledger."""

from aiohttp import web
from pydantic import ValidationError

from loadtest.engine.api.errors import ApiError, engine_dead
from loadtest.engine.api.exchange import json_answer
from loadtest.engine.faults import ServerFaults
from loadtest.engine.ledger import Entry
from loadtest.engine.service import Service


async def ledger(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """GET: counts, peaks and entries. DELETE: forget them."""
    counters = service.engine.scheduler.counters
    if request.method == "DELETE":
        service.ledger.clear()
        counters.peak_running = service.engine.scheduler.num_running
        counters.peak_used_blocks = service.engine.scheduler.pool.num_used
    return json_answer(
        {
            **service.ledger.as_json(),
            "running": service.engine.scheduler.num_running,
            "waiting": service.engine.scheduler.num_waiting,
            "used_blocks": service.engine.scheduler.pool.num_used,
            "peak_running": counters.peak_running,
            "peak_used_blocks": counters.peak_used_blocks,
        }
    )


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
    service.faults.replace(wanted)
    service.engine.pause(wanted.engine_paused or wanted.engine_dead)
    if wanted.engine_dead:
        service.engine.fail_all(engine_dead())
