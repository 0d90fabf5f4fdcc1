"""Sends rows when they are due, whatever the answers do, and records what came of each."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count, cycle

from loadtest.drive.client import Client, open_session
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.workloads.prompts import NO_GROUP, BodyMaker, Endpoint, Prompt
from tests.bench.routing.trace import Row
from tests.bench.routing.wording import Wording

_REQUEST_SECONDS = 180.0


def plan_for(url: str, model: str, endpoint: Endpoint) -> Plan:
    """How requests are sent; their number and times are the caller's."""
    return Plan(url=url, endpoint=endpoint, model=model, concurrency=1, requests=1, timeout_seconds=_REQUEST_SECONDS)


def bodies_of(bodies: BodyMaker, wording: Wording, rows: Sequence[Row]) -> list[bytes]:
    """The requests of a trace, made before its clock runs."""
    return [
        bodies.body(Prompt(NO_GROUP, prefix="", tail=wording.prompt(row, index), max_tokens=row.output_tokens))
        for index, row in enumerate(rows)
    ]


def endless(bodies: BodyMaker, words: Sequence[str], rows: Sequence[Row]) -> Iterator[tuple[Row, bytes]]:
    """A trace again and again, each time in other words, so that no round finds an earlier one in a cache."""
    for round_ in count():
        wording = Wording(words, f"round-{round_}")
        for index, row in enumerate(rows):
            yield (
                row,
                bodies.body(Prompt(NO_GROUP, prefix="", tail=wording.prompt(row, index), max_tokens=row.output_tokens)),
            )


async def replay(
    plan: Plan, rows: Sequence[Row], bodies: Sequence[bytes], at_seconds: float, event: Callable[[], Awaitable[None]]
) -> list[Record]:
    """Open loop: one request a row, at the row's time; `event` happens once, `at_seconds` after the start."""
    origin = time.monotonic() + 0.1
    records: list[Record] = []

    def clock() -> float:
        return time.monotonic() - origin

    async def happen() -> None:
        await asyncio.sleep(at_seconds - clock())
        await event()

    async with open_session(plan) as session, asyncio.TaskGroup() as group:
        client = Client(plan, session, clock)
        group.create_task(happen())
        for index, (row, body) in enumerate(zip(rows, bodies, strict=True)):
            await asyncio.sleep(max(0.0, row.at - clock()))
            record = Record.planned(index, NO_GROUP, row.at, asked_tokens=row.output_tokens)
            records.append(record)
            group.create_task(client.send(record, body))
    return records


async def capacity(plans: Sequence[Plan], requests: Iterator[tuple[Row, bytes]], users: int, seconds: float) -> float:
    """Requests per second that these servers answer when they are always busy and requests go where a user is free.

    Closed loop of `users`; counted from the time when all are at work to the end.
    """
    origin = time.monotonic()
    ends: list[float] = []

    def clock() -> float:
        return time.monotonic() - origin

    async def user(client: Client) -> None:
        while clock() < seconds:
            row, body = next(requests)
            record = Record.planned(len(ends), NO_GROUP, clock(), asked_tokens=row.output_tokens)
            await client.send(record, body)
            if not record.ok:
                raise RuntimeError(f"an engine does not answer: {record.outcome}: {record.detail}")
            ends.append(record.end)

    async with open_session(plans[0]) as session, asyncio.TaskGroup() as group:
        clients = [Client(plan, session, clock) for plan in plans]
        for _, client in zip(range(users), cycle(clients), strict=False):
            group.create_task(user(client))
    counted = [end for end in ends if seconds / 4 <= end <= seconds]
    return len(counted) / (seconds * 3 / 4)
