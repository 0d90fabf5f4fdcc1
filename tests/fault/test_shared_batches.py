"""Several gateways that share batches in S3: each runs lines of one batch, and the others go on when one is killed."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.features.batches.batch import Batch, Owner
from tests.fault.restartable import restartable
from tests.fault.rig import UnderTest, holds, running
from tests.fault.test_batch_storage import CHAT, batch_of, ended, get, lines, upload
from tests.fault.test_batches import IN_FLIGHT, lines_of, reaches, sdk_of, sections, submit
from tests.fault.test_batches import ended as sdk_ended
from tests.postgres import PostgresServer
from tests.s3_server import S3Server
from tests.scripted import ScriptedBackend
from tests.scripts import allow, echo, one_of, pause, until

SEED = int(os.environ.get("BATCH_SEED", "7"))
GROUP_LINES = 512  # that are put together


@asynccontextmanager
async def gateways(batches: dict[str, Any], *backends: ScriptedBackend) -> AsyncIterator[list[UnderTest]]:
    """A gateway for each backend, in this process. Lines that they ran are requests with an outcome, too."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(running(each, sections={"batches": batches})) for each in backends]
        yield found
        for gateway in found:
            await gateway.gateway.features["batches"].batches.stop()
            gateway.counted.accepted = sum(gateway.outcomes.values())


def ran(backend: ScriptedBackend) -> int:
    return len([seen for seen in backend.ledger if seen.played])


async def answers(gateway: UnderTest, file_id: str) -> list[int]:
    """The custom ids of a file's lines."""
    content = await get(gateway, f"/v1/files/{file_id}/content")
    return sorted(int(orjson.loads(line)["custom_id"]) for line in content.splitlines())


def objects(s3: S3Server, batches: dict[str, Any]) -> Counter[str]:
    """How many objects there are of each kind."""
    return Counter(path.partition("/")[0] for path in s3.objects(batches["path"]))


async def test_two_gateways_run_the_lines_of_one_batch(
    s3: S3Server, batches: dict[str, Any], backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(pause(0.01), *echo())
    async with gateways(batches, backend, other) as (one, two):
        batch = await batch_of(one, lines(2000))
        assert (await get(two, f"/v1/batches/{batch['id']}"))["id"] == batch["id"]
        assert (
            await two.ask(b"", method=b"DELETE", target=b"/v1/files/" + batch["input_file_id"].encode())
        ).status == 409
        batch = await ended(two, batch)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 2000, "completed": 2000, "failed": 0}
        assert batch["usage"]["input_tokens"] == 5 * 2000
        for each in (one, two):
            assert await answers(each, batch["output_file_id"]) == [*range(2000)]
            assert (await get(each, "/v1/batches"))["data"] == [batch]
        assert batch["error_file_id"] is None
        assert min(ran(backend), ran(other)) > 100
        assert ran(backend) + ran(other) == 2000
        await holds(lambda: objects(s3, batches)["parts"] == 0, "the parts are deleted")
        assert objects(s3, batches)["files"] == 2
        for file in (batch["input_file_id"], batch["output_file_id"]):
            assert (await one.ask(b"", method=b"DELETE", target=f"/v1/files/{file}".encode())).status == 200
        assert objects(s3, batches) == {"database.id": 1}


@pytest.mark.timeout(150)  # four processes start, and claims last ten seconds
async def test_when_gateways_are_killed_at_random_no_line_is_lost_and_none_is_there_twice(
    tmp_path: Path, batches: dict[str, Any], backend: ScriptedBackend
) -> None:
    chance = random.Random(SEED)
    allowed = asyncio.Semaphore(0)
    backend.plays(one_of(allowed), pause(0.005), *echo())
    names = [f"line {number}" for number in range(3000)]
    own = sections(tmp_path)
    own["batches"] |= batches | {"lines_in_flight": IN_FLIGHT}
    for name in "ab":
        (tmp_path / name).mkdir()
    async with (
        restartable(tmp_path / "a", backend, **own) as one,
        restartable(tmp_path / "b", backend, **own) as two,
        sdk_of(one) as sdk,
        sdk_of(two) as other,
    ):
        batch = await submit(sdk, names)
        allow(allowed, 800)
        await reaches(other, batch, 1)
        for killed in (one, two):
            played, more = len(backend.ledger), chance.randrange(300)
            allow(allowed, 600)
            await holds(lambda n=played + more: len(backend.ledger) > n, "lines run")  # type: ignore[misc]
            killed.processes[-1].send_signal(signal.SIGKILL)
            killed.processes[-1].wait()
            if killed is one:
                one.start()
        await one.ready()
        allow(allowed, 2 * len(names))
        batch = await sdk_ended(sdk, batch)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 3000, "completed": 3000, "failed": 0}
        found = await lines_of(sdk, batch.output_file_id)
        assert sorted(line["custom_id"] for line in found) == sorted(names)
        for line in found:
            assert line["response"]["body"]["choices"][0]["message"]["content"] == line["custom_id"]
        assert one.events("batch_taken_over")
    executed = Counter(orjson.loads(seen.body)["messages"][-1]["content"] for seen in backend.ledger if seen.played)
    assert set(executed) == set(names)
    assert executed.total() - len(names) <= 2 * (GROUP_LINES + IN_FLIGHT)


async def test_a_gateway_that_stops_leaves_its_lines_to_the_others(
    batches: dict[str, Any], backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.plays(until(asyncio.Event()), *echo())  # it never answers
    other.plays(*echo())
    async with gateways(batches, backend, other) as (one, two):
        batch = await batch_of(one, lines(400))
        await holds(lambda: len(backend.ledger) >= 8, "lines are in flight")
        await one.gateway.features["batches"].batches.stop()
        batch = await ended(two, batch)
        assert batch["request_counts"] == {"total": 400, "completed": 400, "failed": 0}
        assert await answers(two, batch["output_file_id"]) == [*range(400)]
        assert ran(other) == 400


async def test_a_batch_is_cancelled_on_all_gateways(
    batches: dict[str, Any], backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    goes_on = asyncio.Event()
    for each in (backend, other):
        for _ in range(20):
            each.plays_once(*echo())
        each.plays(until(goes_on), *echo())
    async with gateways(batches, backend, other) as (one, two):
        batch = await batch_of(one, lines(1000))
        await holds(lambda: min(len(backend.ledger), len(other.ledger)) >= 28, "both have lines in flight")
        cancelled = await two.ask(b"", target=f"/v1/batches/{batch['id']}/cancel".encode())
        assert cancelled.json["status"] == "cancelling"
        goes_on.set()
        while (batch := await get(one, f"/v1/batches/{batch['id']}"))["status"] == "cancelling":
            await asyncio.sleep(0.02)
        assert batch["status"] == "cancelled"
        completed = batch["request_counts"]["completed"]
        assert completed == ran(backend) + ran(other) < 1000
        assert batch["request_counts"]["failed"] == 1000 - completed
        done = await answers(one, batch["output_file_id"])
        assert len(done) == completed
        assert sorted(done + await answers(two, batch["error_file_id"])) == [*range(1000)]


async def test_a_batch_expires_on_all_gateways(
    batches: dict[str, Any], backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        for _ in range(20):
            each.plays_once(*echo())
        each.plays(until(asyncio.Event()), *echo())
    async with gateways(batches, backend, other) as (one, two):
        store, owner = one.gateway.features["batches"].batches._store, Owner("", "")
        file, now = (await upload(one, lines(500))).json["id"], int(one.gateway.core.unix_seconds())
        batch = Batch(
            "batch_1",
            owner=owner,
            endpoint=CHAT,
            input_file_id=file,
            window="1h",
            metadata=None,
            output_lifetime_seconds=0,
            created_at=now,
            expires_at=now + 4,
        )
        await store.put_batch(batch)
        found = await ended(two, batch.document())
        assert found["status"] == "expired"
        assert found["request_counts"] == {"total": 500, "completed": 40, "failed": 460}
        assert len(await answers(one, found["output_file_id"])) == 40
        errors = await get(one, f"/v1/files/{found['error_file_id']}/content")
        assert {orjson.loads(line)["error"]["code"] for line in errors.splitlines()} == {"batch_expired"}


async def test_a_file_that_is_refused_fails_the_batch_for_all(
    batches: dict[str, Any], backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with gateways(batches, backend, other) as (one, two):
        batch = await ended(two, await batch_of(one, b"{}"))
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["line"] == 1
        assert await get(one, f"/v1/batches/{batch['id']}") == batch


async def test_the_files_of_a_key_are_counted_over_all_gateways(
    batches: dict[str, Any], backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with gateways({**batches, "max_bytes_per_key": len(lines(10)) + 1}, backend, other) as (one, two):
        assert (await upload(one, lines(10))).status == 200
        assert (await upload(two, b"{}")).status == 413
        assert (await upload(two, b"{")).status == 200


async def test_a_database_that_is_down_stops_no_lines(
    postgres: PostgresServer, batches: dict[str, Any], backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    allowed = asyncio.Semaphore(100)
    for each in (backend, other):
        each.plays(one_of(allowed), *echo())
    async with gateways(batches, backend, other) as (one, two):
        batch = await batch_of(one, lines(2000))
        await holds(lambda: min(len(backend.ledger), len(other.ledger)) > 0 and allowed.locked(), "both run lines")
        await asyncio.to_thread(postgres.stop)
        refused = await one.ask(b"", method=b"GET", target=b"/v1/batches")
        assert (refused.status, refused.error["code"]) == (503, "storage_unavailable")
        at = len(backend.ledger)
        allow(allowed, 4000)
        await holds(lambda: len(backend.ledger) > at, "lines go on")
        await asyncio.to_thread(postgres.start)
        while (answer := await two.ask(b"", method=b"GET", target=b"/v1/batches")).status == 503:
            await asyncio.sleep(0.05)
        assert answer.status == 200
        batch = await ended(two, batch)
        assert batch["request_counts"] == {"total": 2000, "completed": 2000, "failed": 0}
        assert await answers(one, batch["output_file_id"]) == [*range(2000)]
        for each in (one, two):
            each.events = [event for event in each.events if event["event"] != "batch_database_unavailable"]
