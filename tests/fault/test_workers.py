"""Several workers of one gateway, and what ends them: the engine never gets more than its cap, and the rest goes on."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from loadtest.servers.processes import free_ports
from tests.clients import Client, request
from tests.fault.counting_engine import BODY, CLIENTS, CountingEngine, Load, more, until
from tests.fault.gateway_process import GatewayProcess, gateway_process
from tests.processes import is_there

pytest.importorskip("hiredis")
pytestmark = pytest.mark.timeout(300)
CAP = 4
CHAT = "/v1/chat/completions"
FORM_TYPE = (b"content-type: multipart/form-data; boundary=b",)
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n%b\r\n--b--\r\n'
)
_DEADLINE_SECONDS = 120.0  # a worker starts within it, where many tests share the cores


@asynccontextmanager
async def two_workers(
    folder: Path, engine: CountingEngine, **sections: dict[str, Any]
) -> AsyncIterator[GatewayProcess]:
    """A gateway with two workers that know of each other; its log is in the folder."""
    backend: Any = engine
    settings = {
        "backends": [{"url": engine.url, "name": "engine", "max_in_flight": CAP}],
        "health": {"slow_start_seconds": 0, "probe_interval_seconds": 0.3},
        "admission": {"adaptive": False},
        **sections,
    }
    with (folder / "log").open("ab") as log:
        process = gateway_process(folder, backend, stdout=log, stderr=log, sections=settings, workers=2)
        async with process as gateway:
            await metric_is(gateway, "gateway_workers", 2)
            await metric_is(gateway, "gateway_replicas", 4)  # each of both knows of two
            yield gateway


async def metric_is(gateway: GatewayProcess, name: str, value: float) -> None:
    async def is_so() -> bool:
        with suppress(AssertionError):  # no worker answers yet
            return await gateway.metric(name) == value
        return False

    await until(is_so, f"{name} is {value}", _DEADLINE_SECONDS)


def workers_of(gateway: GatewayProcess) -> list[int]:
    pid = gateway.process.pid
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """The events of this name in the log; every line of it is a whole one."""
    lines = [orjson.loads(line) for line in (folder / "log").read_bytes().splitlines() if line.startswith(b"{")]
    return [line for line in lines if line.get("event") == name]


async def logged(folder: Path, name: str, count: int) -> list[dict[str, Any]]:
    async def are_logged() -> bool:
        return len(events(folder, name)) >= count

    await until(are_logged, f"{count} times {name}")
    return events(folder, name)


async def admin(gateway: GatewayProcess, target: str, method: bytes = b"GET", body: bytes = b"") -> Any:
    async with await Client.connect(gateway.admin_port) as client:
        await client.send(request(body, method=method, target=target.encode()))
        return await client.answer(_DEADLINE_SECONDS)


async def test_a_worker_that_is_killed_cuts_its_own_clients_alone_and_is_back(tmp_path: Path) -> None:
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine) as gateway:
        load = Load(gateway)
        try:
            await more(load, 24)
            one, other = workers_of(gateway)
            os.kill(one, signal.SIGKILL)
            await metric_is(gateway, "gateway_worker_restarts_total", 1)
            await metric_is(gateway, "gateway_workers", 2)
            await metric_is(gateway, "gateway_replicas", 4)
            await metric_is(gateway, "gateway_backend_in_flight", CAP)  # its slots are used again
            await more(load, 24)
            assert (engine.peak, load.failed) == (CAP, [])
            assert load.cut <= CLIENTS
            assert other in workers_of(gateway)
            (ended,) = events(tmp_path, "worker_ended")
            assert (ended["exit_code"], ended["starts_again_in_seconds"]) == (-signal.SIGKILL, 0)
            assert await gateway.metric("gateway_cache_updates_total") > 0
        finally:
            await load.stop()


async def test_a_reload_reaches_all_workers_and_a_change_on_the_admin_port_too(tmp_path: Path) -> None:
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine) as gateway:
        file = tmp_path / "gateway.yaml"
        document = yaml.safe_load(file.read_text())
        document["backends"][0]["max_in_flight"] = 2
        file.write_text(yaml.safe_dump(document))
        gateway.process.send_signal(signal.SIGHUP)
        assert {each["worker"] for each in await logged(tmp_path, "reloaded", 2)} == {0, 1}
        await metric_is(gateway, "gateway_backend_in_flight_limit", 2 * 2)  # as each knows it
        load = Load(gateway)

        async def is_capped() -> bool:
            engine.peak = 0
            await more(load, 8)
            return engine.peak == 2

        await until(is_capped, "both give up what they had of the cap")
        assert load.failed == []
        await load.stop()

        document["server"]["workers"] = 3
        file.write_text(yaml.safe_dump(document))
        answer = await admin(gateway, "/admin/reload", b"POST")
        assert [each["path"] for each in answer.json["needs_restart"]] == ["server.workers"]
        answer = await admin(gateway, "/admin/backends/engine/drain?wait_seconds=30", b"POST")
        assert (answer.status, answer.json["drained"]) == (200, True)
        for number in range(2):
            (backend,) = (await admin(gateway, f"/worker/{number}/admin/backends")).json["backends"]
            assert backend["draining"]


async def test_sigterm_lets_all_workers_drain(tmp_path: Path) -> None:
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine) as gateway:
        async with await Client.connect(gateway.port) as one, await Client.connect(gateway.port) as two:
            for client in (one, two):
                await client.send(request(BODY, target=b"/v1/chat/completions"))
            await until(lambda: true(engine.in_flight == 2), "both are answered")
            workers = workers_of(gateway)
            for pid in (gateway.process.pid, *workers):  # as what supervises a group of processes does
                os.kill(pid, signal.SIGTERM)
            assert [(await client.answer()).status for client in (one, two)] == [200, 200]
        assert await asyncio.to_thread(gateway.process.wait, _DEADLINE_SECONDS) == 0
        assert not any(map(is_there, workers))
        with pytest.raises(ConnectionError):
            await Client.connect(gateway.port)
        assert events(tmp_path, "worker_ended") == []


async def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine) as gateway:
        load, workers = Load(gateway), workers_of(gateway)
        await more(load, 8)
        gateway.process.kill()
        await until(lambda: true(not any(map(is_there, workers))), "they have ended")
        await load.stop()
        await until(lambda: true(engine.in_flight == 0), "the engine aborts what it had")


async def test_a_worker_that_is_told_to_end_drains_and_is_replaced(tmp_path: Path) -> None:
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine) as gateway:
        load = Load(gateway)
        await more(load, 8)
        os.kill(workers_of(gateway)[1], signal.SIGTERM)
        await metric_is(gateway, "gateway_worker_restarts_total", 1)
        await metric_is(gateway, "gateway_workers", 2)
        await more(load, 24)
        await load.stop()
        assert (engine.peak, load.failed, load.cut) == (CAP, [], 0)
        (ended,) = events(tmp_path, "worker_ended")
        assert ended["exit_code"] == 0


async def test_a_gateway_whose_workers_cannot_start_ends(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    main, admin_port = free_ports(2)
    server = {"port": main, "admin": {"port": admin_port}, "workers": 2}
    document = {
        "server": server,
        "backends": [{"url": "http://127.0.0.1:1"}],
        "batches": {"path": f"{tmp_path}/file/x"},
    }
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "gateway", "serve", "-c", str(tmp_path / "gateway.yaml")]
    with (tmp_path / "log").open("wb") as log:
        ended = await asyncio.to_thread(subprocess.run, command, stdout=log, stderr=log, timeout=_DEADLINE_SECONDS)
    assert ended.returncode == 1
    assert [each["worker"] for each in events(tmp_path, "worker_not_started")] == [0]


async def test_the_admin_port_answers_for_all_workers_and_for_each(tmp_path: Path) -> None:
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine) as gateway:
        assert (await admin(gateway, "/readyz")).json == {"status": "ready"}
        page = (await admin(gateway, "/metrics")).body
        assert page.count(b"# TYPE gateway_replicas gauge") == 1
        assert b'gateway_backend_up{worker="0",backend="engine"} 1.0' in page
        assert b'gateway_backend_up{worker="1",backend="engine"} 1.0' in page
        for number in range(2):
            answer = await admin(gateway, f"/worker/{number}/metrics")
            assert answer.header("x-gateway-worker") == f"{number}/2"
            assert b'gateway_backend_up{backend="engine"} 1.0' in answer.body
        assert (await admin(gateway, "/")).header("x-gateway-worker") == "0/2"
        for target, method in (("/worker/2/admin/queue", b"GET"), ("/worker/2/admin/restart", b"POST")):
            answer = await admin(gateway, target, method)
            assert answer.status == 400, answer.body
        async with await Client.connect(gateway.admin_port) as client:
            await client.send(request(b"", method=b"GET", target=b"/metrics").replace(b"gateway", b"evil.example", 1))
            assert (await client.answer()).status == 403


async def true(value: bool) -> bool:
    return value


async def test_every_worker_accepts_batches_and_no_line_is_run_twice(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n in range(24)]
    batches = {"path": str(tmp_path / "batches"), "idle_only": False}
    async with CountingEngine().running() as engine, two_workers(tmp_path, engine, batches=batches) as gateway:
        content = b"\n".join(map(orjson.dumps, lines))
        files = [await posted(gateway, "/v1/files", FORM % content, *FORM_TYPE) for _ in range(6)]
        wanted = {"input_file_id": files[0]["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = await posted(gateway, "/v1/batches", orjson.dumps(wanted))

        async def is_completed() -> bool:
            nonlocal batch
            batch = (await gateway.get(f"/v1/batches/{batch['id']}")).json
            return bool(batch["status"] == "completed")

        await until(is_completed, "the batch is completed")
        for _ in range(8):  # each by a connection of its own: some come to the worker that passes them on
            answer = await gateway.get(f"/v1/files/{batch['output_file_id']}/content")
            answered = sorted(int(orjson.loads(line)["custom_id"]) for line in answer.body.splitlines())
            assert (answered, answer.complete) == ([*range(24)], True)
        assert (engine.answered, engine.peak) == (24, CAP)
        refused = [await gateway.get("/v1/batches/batch_none") for _ in range(8)]
        assert {(each.status, each.error["code"]) for each in refused} == {(404, "batch_not_found")}
        for number in range(2):
            page = (await admin(gateway, f"/worker/{number}/metrics")).body
            assert b'endpoint="batches"' in page, "some requests came to each worker"


async def posted(gateway: GatewayProcess, target: str, body: bytes, *headers: bytes) -> dict[str, Any]:
    async with await Client.connect(gateway.port) as client:
        await client.send(request(body, *headers, target=target.encode()))
        answer = await client.answer()
        assert answer.status == 200, answer.body
        return dict(answer.json)
