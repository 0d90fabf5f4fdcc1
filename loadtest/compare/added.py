"""How much later an answer comes through a proxy: single requests, in turns with and without it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loadtest.compare.schema import Added
from loadtest.drive.client import Client, open_session
from loadtest.drive.plan import Plan
from loadtest.drive.record import INTERRUPTED, Record
from loadtest.report.statistics import percentile
from loadtest.workloads.body import BodyMaker, Endpoint
from loadtest.workloads.prompts import NO_GROUP, Prompt

_WARM_UPS = 4
_TIMEOUT_SECONDS = 60.0


async def added_latency(engines: Sequence[str], proxy: str, endpoint: Endpoint, model: str, pairs: int) -> Added | None:
    """Short whole answers of one token, no two at once; None where too few came."""
    bodies = BodyMaker(endpoint, model, stream=False)
    plan = Plan(url=proxy, endpoint=endpoint, model=model, stream=False, concurrency=1, requests=1,
                timeout_seconds=_TIMEOUT_SECONDS)  # fmt: skip
    found: list[tuple[float, float]] = []
    async with open_session(plan) as session:
        direct = [Client(plan.model_copy(update={"url": url}), session, time.monotonic) for url in engines]
        through = Client(plan, session, time.monotonic)
        for number in range(-_WARM_UPS, pairs):
            body = bodies.body(Prompt(NO_GROUP, "", f"{number} is a number, and so is", 1))
            # Who goes first changes, too: the second may find something warm.
            both = [direct[number % len(direct)], through]
            took = [await _seconds(client, body) for client in (both if number % 2 else both[::-1])]
            without, with_proxy = took if number % 2 else took[::-1]
            if number >= 0 and without is not None and with_proxy is not None:
                found.append((without, with_proxy))
    return added_of(found)


def added_of(pairs: Sequence[tuple[float, float]]) -> Added | None:
    if not pairs:
        return None
    differences = sorted((with_proxy - without) * 1e3 for without, with_proxy in pairs)
    direct = sorted(without * 1e3 for without, _ in pairs)
    return Added(
        pairs=len(pairs),
        direct_p50=percentile(direct, 50),
        p50=percentile(differences, 50),
        p99=percentile(differences, 99),
    )


async def _seconds(client: Client, body: bytes) -> float | None:
    now = time.monotonic()
    record = Record(index=0, group=NO_GROUP, intended=now, sent=now, end=now, outcome=INTERRUPTED)
    await client.send(record, body)
    return record.end - record.sent if record.ok else None
