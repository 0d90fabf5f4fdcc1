"""Workers are replaced by new processes while clients use them: none of them notices, and no cap is exceeded."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from tests.clients import Client, request
from tests.fault.counting_engine import BODY, CountingEngine, Load, more, until
from tests.fault.gateway_process import GatewayProcess
from tests.fault.test_workers import (
    CAP,
    CHAT,
    FORM,
    FORM_TYPE,
    admin,
    events,
    metric_is,
    posted,
    true,
    two_workers,
    workers_of,
)

pytest.importorskip("hiredis")
pytestmark = pytest.mark.timeout(300)


async def restart(gateway: GatewayProcess, target: str = "/admin/restart") -> list[dict[str, int]]:
    """The workers that were replaced."""
    answer = await admin(gateway, target, b"POST")
    assert answer.status == 200, answer.body
    return list(answer.json["workers"])


def rewrite(folder: Path, **sections: Any) -> str:
    """Change the configuration; returns it as it was."""
    file = folder / "gateway.yaml"
    before = file.read_text()
    file.write_text(yaml.safe_dump({**yaml.safe_load(before), **sections}))
    return before


async def test_three_generations_in_a_row_lose_no_request_and_exceed_no_cap(tmp_path: Path) -> None:
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine) as gateway:
        parent, load = gateway.process.pid, Load(gateway)
        idle = [await Client.connect(gateway.port) for _ in range(6)]
        generations = [set(workers_of(gateway))]
        for _ in range(3):
            replaced = await restart(gateway)
            assert [each["worker"] for each in replaced] == [0, 1]
            assert {each["former_pid"] for each in replaced} == generations[-1]
            generations.append({each["pid"] for each in replaced})
            await more(load, 8)
        for client in idle:  # connections outlive the processes that accepted them
            await client.send(request(BODY, target=CHAT.encode()))
            assert (await client.answer()).status == 200
            client.close()
        await until(lambda: true(set(workers_of(gateway)) == generations[-1]), "the others have ended")
        await load.finish()
        assert (engine.peak, load.failed, load.cut) == (CAP, [], 0)
        assert gateway.process.pid == parent
        assert events(tmp_path, "worker_ended") == []
        assert await gateway.metric("gateway_worker_restarts_total") == 0
        await metric_is(gateway, "gateway_replicas", 4)


async def test_a_restart_that_fails_leaves_all_workers_as_they_were(tmp_path: Path) -> None:
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine) as gateway:
        workers, load = workers_of(gateway), Load(gateway)
        right = rewrite(tmp_path, routing={"aging": -1})
        refused = await admin(gateway, "/admin/restart", b"POST")
        assert (refused.status, "routing.aging" in refused.error["message"]) == (400, True)

        document = yaml.safe_load(right)
        rewrite(tmp_path, **document | {"routing": {}, "server": document["server"] | {"workers": 3}})
        refused = await admin(gateway, "/admin/restart", b"POST")
        assert (refused.status, "server.workers" in refused.error["message"]) == (400, True)

        (tmp_path / "file").touch()  # the new process dies at once
        (tmp_path / "gateway.yaml").write_text(right)
        rewrite(tmp_path, batches={"path": f"{tmp_path}/file/x"})
        failed = await admin(gateway, "/admin/restart", b"POST")
        assert (failed.status, failed.error["code"]) == (500, "restart_failed")
        assert "exit code 1" in failed.error["message"]
        assert workers_of(gateway) == workers

        (tmp_path / "gateway.yaml").write_text(right)
        assert {each["former_pid"] for each in await restart(gateway)} == {*workers}
        await load.finish()
        assert (engine.peak, load.failed, load.cut) == (CAP, [], 0)


async def test_one_worker_may_be_replaced_and_one_that_then_crashes_is_back(tmp_path: Path) -> None:
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine) as gateway:
        (replaced,) = await restart(gateway, "/worker/1/admin/restart")
        assert replaced["worker"] == 1
        os.kill(replaced["pid"], signal.SIGKILL)
        await metric_is(gateway, "gateway_worker_restarts_total", 1)
        await metric_is(gateway, "gateway_workers", 2)
        await metric_is(gateway, "gateway_replicas", 4)
        (ended,) = events(tmp_path, "worker_ended")
        assert ended["worker"] == 1
        await restart(gateway)
        assert (await admin(gateway, "/worker/1/admin/queue")).status == 200


async def test_sigterm_lets_those_that_were_replaced_end_their_responses(tmp_path: Path) -> None:
    async with CountingEngine(answer_seconds=6.0).running() as engine, two_workers(tmp_path, engine) as gateway:
        clients = [await Client.connect(gateway.port) for _ in range(CAP)]
        for client in clients:
            await client.send(request(BODY, target=CHAT.encode()))
        await until(lambda: true(engine.in_flight > 0), "they are answered")
        await restart(gateway)
        for pid in (gateway.process.pid, *workers_of(gateway)):  # as what supervises a group of processes does
            os.kill(pid, signal.SIGTERM)
        for client in clients:
            assert (await client.answer(60.0)).status == 200
            client.close()
        assert await asyncio.to_thread(gateway.process.wait, 60) == 0
        assert engine.peak <= CAP


async def test_batches_go_on_in_the_worker_that_takes_over(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n in range(40)]
    batches = {"path": str(tmp_path / "batches"), "idle_only": False}
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine, batches=batches) as gateway:
        file = await posted(gateway, "/v1/files", FORM % b"\n".join(map(orjson.dumps, lines)), *FORM_TYPE)
        wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = await posted(gateway, "/v1/batches", orjson.dumps(wanted))
        await until(lambda: true(engine.answered > 0), "it has begun")
        await restart(gateway)

        async def is_completed() -> bool:
            nonlocal batch
            batch = (await gateway.get(f"/v1/batches/{batch['id']}")).json
            return bool(batch["status"] == "completed")

        await until(is_completed, "the batch is completed")
        for _ in range(8):  # each by a connection of its own: some come to the worker that passes them on
            answer = await gateway.get(f"/v1/files/{batch['output_file_id']}/content")
            answered = sorted(int(orjson.loads(line)["custom_id"]) for line in answer.body.splitlines())
            assert (answered, answer.complete) == ([*range(40)], True)
        assert engine.peak <= CAP
