"""The gateway is process 1, as in a container, which ends with it: it is replaced all the same."""

import asyncio
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.clients import Client, chat, request
from tests.fault.restartable import Restartable, restartable
from tests.fault.rig import holds
from tests.scripted import ScriptedBackend
from tests.scripts import chunk, head, json_answer, last_chunk, until

AS_FIRST = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
STREAM = chat(stream=True)
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


def may_unshare() -> bool:
    try:
        return subprocess.run([*AS_FIRST, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not may_unshare(), reason="needs a PID namespace of its own (root, and util-linux)")


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def first_of(gateway: Restartable) -> int:
    """Process 1, by its number outside."""
    (first,) = children_of(gateway.processes[0].pid)
    return first


async def ends(gateway: Restartable) -> int:
    return await asyncio.to_thread(gateway.processes[0].wait, 20)


async def test_three_generations_in_a_row_lose_no_request_and_exceed_no_cap(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    finish = [asyncio.Event() for _ in range(3)]
    async with restartable(tmp_path, backend, cap=6, command=AS_FIRST) as gateway:
        clients, pids = list[Client](), list[int]()
        for end in finish:  # each process has a stream of its own
            backend.plays_once(*[head(200), chunk(EVENT), until(end), chunk(b"data: [DONE]\n\n"), last_chunk()])
            backend.plays(*json_answer())
            clients.append(await gateway.client())
            await clients[-1].send(request(STREAM))
            await holds(lambda: backend.running == len(clients), "the stream runs")
            restart = asyncio.create_task(gateway.restart())
            while not restart.done():
                assert (await gateway.ask(chat())).status == 200
                await asyncio.sleep(0.02)
            pids.append(await restart)
        assert len(set(pids)) == 3
        for client, end in zip(clients, finish, strict=True):
            end.set()
            assert (await client.answer()).is_done
            client.close()
        await holds(lambda: len(children_of(first_of(gateway))) == 1, "those that have ended are reaped")
        assert backend.most_running <= 6
        os.kill(first_of(gateway), signal.SIGTERM)
        assert await ends(gateway) == 0


async def test_a_restart_that_fails_leaves_everything_as_it_was(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend, command=AS_FIRST) as gateway:
        right = gateway.file.read_text()
        gateway.file.write_text(f"{right}routing: {{aging: -1}}\n")
        refused = await gateway.asks_admin("/admin/restart", seconds=60.0)
        assert (refused.status, "routing.aging" in refused.error["message"]) == (400, True)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            gateway.file.write_text(right)
            gateway.rewrite(server={"host": "127.0.0.1", "port": taken.getsockname()[1], "admin": None})
            failed = await gateway.asks_admin("/admin/restart", seconds=60.0)  # the new process dies at once
            assert (failed.status, "exit code 1" in failed.error["message"]) == (500, True)
        gateway.file.write_text(right)
        assert (await gateway.ask(chat())).status == 200
        await gateway.restart()
        assert (await gateway.ask(chat())).status == 200


async def test_it_reloads_and_ends_as_the_gateway_does(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend, command=AS_FIRST) as gateway:
        os.kill(first_of(gateway), signal.SIGHUP)
        await holds(lambda: bool(gateway.events("reloaded")), "it is logged")
        (only,) = children_of(first_of(gateway))
        os.kill(only, signal.SIGKILL)
        assert await ends(gateway) == 128 + signal.SIGKILL


async def test_a_mistake_in_the_configuration_ends_it_with_the_code_of_the_command(tmp_path: Path) -> None:
    gateway = Restartable(tmp_path, 0, 0, {})
    gateway.file.write_text("backends: 1\n")
    gateway.start(command=AS_FIRST)
    assert await ends(gateway) == 2
