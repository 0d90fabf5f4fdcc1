"""The configuration is read again while requests run: it applies to those that come, and disturbs none."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import orjson
import yaml

from tests.clients import Client, chat, request
from tests.fault.gateway_process import GatewayProcess, gateway_process
from tests.fault.rig import holds
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import hang, json_answer, stream

ALICE, BOB = {"name": "alice", "key": "sk-alice-1"}, {"name": "bob", "key": "sk-bob-1"}


def rewrite(folder: Path, **sections: Any) -> None:
    """Change the configuration file."""
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **sections}))


async def asks_admin(gateway: GatewayProcess, method: bytes = b"POST", target: bytes = b"/admin/reload") -> Any:
    async with await Client.connect(gateway.admin_port) as client:
        await client.send(request(b"", method=method, target=target))
        return orjson.loads((await client.answer()).body)


async def status(gateway: GatewayProcess, key: str = "", model: str = MODEL) -> int:
    headers = [f"authorization: Bearer {key}".encode()] if key else []
    async with await gateway.client() as client:
        await client.send(request(chat(model=model), *headers))
        return (await client.answer()).status


async def test_keys_aliases_and_backends_follow_the_file(
    tmp_path: Path, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(*json_answer())
    async with gateway_process(tmp_path, backend, sections={"auth": {"keys": [ALICE]}}) as gateway:
        assert await status(gateway, "sk-alice-1") == 200
        assert await status(gateway, "sk-bob-1") == 401
        rewrite(
            tmp_path,
            auth={"keys": [BOB]},
            models={"aliases": {"gpt": MODEL}},
            backends=[{"url": other.url, "name": "new"}],
        )
        done = await asks_admin(gateway)
        assert [each["path"] for each in done["changed"]] == [
            f"backends.{backend.url.removeprefix('http://')}",
            "backends.new",
            "auth.keys.alice",
            "auth.keys.bob",
            "models.aliases.gpt",
        ]
        assert done["needs_restart"] == []
        assert "sk-" not in str(done)
        assert await status(gateway, "sk-alice-1") == 401
        assert await status(gateway, "sk-bob-1", "gpt") == 200
        assert len(other.ledger) == 1
        assert await asks_admin(gateway) == {"changed": [], "needs_restart": []}


async def test_a_file_that_is_wrong_changes_nothing_and_names_the_line(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    backend.plays(*json_answer())
    async with gateway_process(tmp_path, backend) as gateway:
        file = tmp_path / "gateway.yaml"
        right = file.read_text()
        file.write_text(f"{right}routing:\n  aging: -1\n")
        answer = await asks_admin(gateway)
        line = len(right.splitlines()) + 2
        assert f"Nothing was changed. {file}:{line}: routing.aging: " in answer["error"]["message"]
        assert await status(gateway) == 200
        file.unlink()
        assert "No such file" in (await asks_admin(gateway))["error"]["message"]
        assert await status(gateway) == 200


async def test_what_needs_a_restart_is_listed_each_time(tmp_path: Path, backend: ScriptedBackend) -> None:
    async with gateway_process(tmp_path, backend) as gateway:
        server = yaml.safe_load((tmp_path / "gateway.yaml").read_text())["server"]
        rewrite(tmp_path, server={**server, "port": 1})
        for _ in range(2):
            done = await asks_admin(gateway)
            assert done["changed"] == []
            assert done["needs_restart"] == [{"path": "server.port", "before": gateway.port, "after": 1}]


async def test_what_a_key_has_used_counts_on_under_its_new_limit(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    limited = ALICE | {"requests_per_minute": 3}
    async with gateway_process(tmp_path, backend, sections={"auth": {"keys": [limited]}}) as gateway:
        assert [await status(gateway, "sk-alice-1") for _ in range(4)] == [200, 200, 200, 429]
        rewrite(tmp_path, auth={"keys": [ALICE | {"requests_per_minute": 4}]})
        await asks_admin(gateway)
        assert [await status(gateway, "sk-alice-1") for _ in range(2)] == [200, 429]
        rewrite(tmp_path, auth={"keys": [ALICE]})
        await asks_admin(gateway)
        assert await status(gateway, "sk-alice-1") == 200


async def test_sighup_reloads_and_the_stream_that_runs_does_not_notice(
    tmp_path: Path, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.plays(hang())
    other.plays(*stream(3))
    with (tmp_path / "log").open("wb") as log:
        async with gateway_process(tmp_path, backend, stderr=log) as gateway, await gateway.client() as client:
            await client.send(request(chat(stream=True)))
            await holds(lambda: len(backend.ledger) == 1, "it runs")
            rewrite(tmp_path, backends=[{"url": other.url}])
            gateway.process.send_signal(signal.SIGHUP)
            await holds(lambda: b'"event": "reloaded"' in (tmp_path / "log").read_bytes(), "it was reloaded")
            async with await gateway.client() as second:
                await second.send(request(chat(stream=True)))
                assert (await second.answer()).is_done
            assert (len(backend.ledger), len(other.ledger)) == (1, 1)
            assert backend.ledger[0].peer_left_at is None


async def test_reloads_under_traffic_fail_no_request(
    tmp_path: Path, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(*json_answer())
    both = [{"url": backend.url}, {"url": other.url}]
    async with gateway_process(tmp_path, backend, sections={"auth": {"keys": [ALICE]}}) as gateway:
        statuses, stopped = list[int](), asyncio.Event()

        async def client() -> None:
            while not stopped.is_set():
                statuses.append(await status(gateway, "sk-alice-1"))

        clients = [asyncio.create_task(client()) for _ in range(6)]
        for turn in range(6):
            sent = len(other.ledger)
            rewrite(tmp_path, backends=both if turn % 2 == 0 else both[:1], auth={"keys": [ALICE, BOB][: 1 + turn % 2]})
            assert (await asks_admin(gateway))["changed"]
            if turn % 2 == 0:
                await holds(lambda sent=sent: len(other.ledger) > sent, "the other serves")
        stopped.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}


async def test_a_file_that_is_watched_is_read_when_it_changes(
    tmp_path: Path, backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    other.plays(*json_answer())
    with (tmp_path / "log").open("wb") as log:
        async with gateway_process(tmp_path, backend, stderr=log, sections={"config": {"watch": True}}) as gateway:
            (tmp_path / "gateway.yaml").rename(tmp_path / "elsewhere.yaml")  # as an editor replaces a file
            await asyncio.sleep(1.5)
            (tmp_path / "elsewhere.yaml").rename(tmp_path / "gateway.yaml")
            rewrite(tmp_path, backends=[{"url": other.url}])
            await holds(lambda: b'"event": "reloaded"' in (tmp_path / "log").read_bytes(), "it was reloaded")
            assert await status(gateway) == 200
            assert len(other.ledger) == 1
    assert b"background_error" not in (tmp_path / "log").read_bytes()
