"""Batches of keys and tenants: apart from each other, within a quota, and without their key when that is gone."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.config.file import parse
from gateway.features.keys.usage import totals
from tests.clients import Answer
from tests.fault.rig import QUICK, UnderTest, holds, merged, running
from tests.fault.test_batch_storage import CHAT, FILES, FORM, form, lines
from tests.scripted import ScriptedBackend
from tests.scripts import echo, until

KEYS = [{"name": "a", "key": "sk-a", "isolate_cache": True}, {"name": "b", "key": "sk-b"}]


def sections(folder: Path, **batches: Any) -> dict[str, dict[str, Any]]:
    settings = {"path": str(folder / "batches"), **batches}
    return {"batches": settings, "auth": {"keys": KEYS}, "admission": {"tenant_header": "x-tenant"}}


async def ask(gateway: UnderTest, method: bytes, target: str, body: bytes = b"", *headers: bytes) -> Answer:
    return await gateway.ask(body, b"authorization: Bearer sk-a", *headers, method=method, target=target.encode())


async def submit(gateway: UnderTest, count: int, *headers: bytes, **more: Any) -> str:
    """Start a batch; returns its id."""
    file = (await ask(gateway, b"POST", FILES.decode(), form(lines(count)), FORM, *headers)).json["id"]
    wanted = {"input_file_id": file, "endpoint": CHAT, "completion_window": "1h", **more}
    return str((await ask(gateway, b"POST", "/v1/batches", orjson.dumps(wanted), *headers)).json["id"])


async def ended(gateway: UnderTest, batch: str, *headers: bytes) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = (await ask(gateway, b"GET", f"/v1/batches/{batch}", b"", *headers)).json
        if found["status"] not in ("validating", "in_progress", "finalizing", "cancelling"):
            return found
        await asyncio.sleep(0.02)


async def test_tenants_of_one_key_are_apart(backend: ScriptedBackend, tmp_path: Path) -> None:
    backend.plays(*echo())
    one, two = b"x-tenant: one", b"x-tenant: two"
    async with running(backend, sections=sections(tmp_path)) as gateway:
        batch = await submit(gateway, 3, one)
        gateway.counted.accepted += 3
        found = await ended(gateway, batch, one)
        assert found["request_counts"]["completed"] == 3
        for headers in ((), (two,)):
            assert (await ask(gateway, b"GET", f"/v1/batches/{batch}", b"", *headers)).status == 404
            assert (await ask(gateway, b"GET", f"/v1/files/{found['output_file_id']}", b"", *headers)).status == 404
        assert (await ask(gateway, b"GET", f"/v1/files/{found['output_file_id']}", b"", one)).status == 200
    logged = [orjson.loads(line) for line in gateway.log.getvalue().splitlines()]
    assert [line["client"] for line in logged if line["endpoint"] == "chat"] == ["a"] * 3
    assert all(b"cache_salt" in seen.body for seen in backend.ledger)


async def test_lines_of_a_key_that_is_removed_fail(backend: ScriptedBackend, tmp_path: Path) -> None:
    go_on = asyncio.Event()
    backend.plays(until(go_on), *echo())
    made = sections(tmp_path, lines_in_flight=2)
    async with running(backend, sections=made) as gateway:
        batch = await submit(gateway, 10)
        gateway.counted.accepted += 10
        await holds(lambda: backend.running == 2, "lines run")
        config = gateway.gateway.core.config
        others = parse({**merged(QUICK, made, {"auth": {"keys": KEYS[1:]}}), "backends": [{"url": backend.url}]})
        gateway.gateway.apply(config.model_copy(update={"auth": others.auth}))
        go_on.set()
        await holds(
            lambda: (
                gateway.gateway.features["batches"].batches is not None
                and not gateway.gateway.features["batches"].batches.runner.states()
            ),
            "it ended",
        )
        gateway.gateway.apply(config)
        found = await ended(gateway, batch)
        assert found["request_counts"] == {"total": 10, "completed": 2, "failed": 8}
        errors = (await ask(gateway, b"GET", f"/v1/files/{found['error_file_id']}/content")).body.splitlines()
        assert {orjson.loads(line)["response"]["status_code"] for line in errors} == {401}


async def test_a_key_has_a_quota_of_lines(backend: ScriptedBackend, tmp_path: Path) -> None:
    go_on = asyncio.Event()
    backend.plays(until(go_on), *echo())
    async with running(backend, sections=sections(tmp_path, max_enqueued_lines_per_key=15)) as gateway:
        first = await submit(gateway, 10)
        await holds(lambda: backend.running > 0, "lines run")
        refused = await ended(gateway, await submit(gateway, 6))
        assert [error["code"] for error in refused["errors"]["data"]] == ["enqueued_request_limit_exceeded"]
        go_on.set()
        assert (await ended(gateway, first))["status"] == "completed"
        assert (await ended(gateway, await submit(gateway, 6)))["status"] == "completed"
        gateway.counted.accepted += 16


async def test_a_batch_waits_for_the_budget_of_its_key_and_goes_on_when_it_is_raised(
    backend: ScriptedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.features.batches.run._MOST_BACKOFF_SECONDS", 0.05)
    backend.plays(*echo())

    def budget(tokens: int) -> dict[str, Any]:
        return {"auth": {"keys": [KEYS[0] | {"tokens_per_day": tokens}]}}

    made = merged(sections(tmp_path, lines_in_flight=1), budget(600))
    async with running(backend, sections=made) as gateway:
        batch = await submit(gateway, 120, completion_window="720h")

        async def shown() -> dict[str, Any]:
            return dict((await ask(gateway, b"GET", f"/v1/batches/{batch}")).json)

        while not (paused := await shown()).get("paused"):
            await asyncio.sleep(0.02)
        assert "600 tokens per day" in paused["paused"]
        assert paused["status"] == "in_progress"
        assert paused["request_counts"]["failed"] == 0
        assert 0 < paused["request_counts"]["completed"] < 120
        used = gateway.gateway.features["keys"].limits.spent()["a"]["day"][1]
        assert used == paused["usage"]["total_tokens"]
        rows = totals(gateway.gateway.features["keys"].usage_now(), 0, 1 << 30, by_day=False)
        assert used == sum(counts[1] + counts[3] for *_, counts in rows)

        raised = parse({**merged(QUICK, made, budget(1000000)), "backends": [{"url": backend.url}]})
        gateway.gateway.apply(gateway.gateway.core.config.model_copy(update={"auth": raised.auth}))
        found = await ended(gateway, batch)
        assert found["request_counts"] == {"total": 120, "completed": 120, "failed": 0}
        assert "paused" not in found
        gateway.counted.accepted += gateway.outcomes["quota_exceeded"] + 120


async def test_lines_that_no_budget_of_their_key_allows_fail_as_requests_do(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    backend.plays(*echo())
    made = merged(sections(tmp_path), {"auth": {"keys": [KEYS[0] | {"tokens_per_month": 3}]}})
    async with running(backend, sections=made) as gateway:
        found = await ended(gateway, await submit(gateway, 5))
        gateway.counted.accepted += 5
        assert (found["status"], found["request_counts"]["failed"]) == ("completed", 5)
        errors = (await ask(gateway, b"GET", f"/v1/files/{found['error_file_id']}/content")).body.splitlines()
        responses = [orjson.loads(line)["response"] for line in errors]
        assert {each["status_code"] for each in responses} == {429}
        assert {each["body"]["error"]["code"] for each in responses} == {"insufficient_quota"}
        assert backend.ledger == []


async def test_results_expire_when_the_client_says(backend: ScriptedBackend, tmp_path: Path) -> None:
    backend.plays(*echo())
    async with running(backend, sections=sections(tmp_path)) as gateway:
        expiry = {"anchor": "created_at", "seconds": 7200}
        found = await ended(gateway, await submit(gateway, 1, output_expires_after=expiry))
        gateway.counted.accepted += 1
        file = (await ask(gateway, b"GET", f"/v1/files/{found['output_file_id']}")).json
        assert file["expires_at"] == file["created_at"] + 7200
