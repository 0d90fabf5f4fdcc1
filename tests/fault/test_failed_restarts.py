"""A new process fails at each step of taking over: the old one goes on, and no client notices."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.features.handover.channel import address_of
from tests.clients import chat, request
from tests.fault.restartable import Restartable, restartable
from tests.fault.rig import holds
from tests.scripted import ScriptedBackend
from tests.scripts import json_answer

PEER = """
import asyncio, os, signal, sys
from gateway.features.handover.channel import connect
from gateway.features.handover.snapshot import FORMAT

async def main(address, last):
    def step(name):
        if name == last:
            os.kill(os.getpid(), signal.SIGKILL)
    channel = connect(bytes.fromhex(address))
    step("connected")
    channel.post({"is": "hello", "protocol": 1, "format": FORMAT, "confirms": True})
    step("hello")
    offer = await channel.receive()
    step("offer")
    channel.post({"is": "ready"})
    step("ready")
    await channel.receive()
    step("go")
    if last == "hangs":
        os.kill(os.getpid(), signal.SIGSTOP)
    channel.post({"is": "lent", "number": 1, "lent": {}})
    step("lent")

asyncio.run(main(*sys.argv[1:]))
"""
DIES = """
import os, signal, sys
from gateway.features.handover import succession
from gateway.__main__ import main
from gateway.app import Gateway
from gateway.features.handover.conversation import Successor

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

async def after_go(self):
    await taken(self)
    die()

taken = succession.Handover.take_place
if sys.argv.pop(1) == "go":
    succession.Handover.take_place = after_go
else:
    Successor.serves = die
main()
"""

IMPATIENT = """
from gateway.features.handover import conversation
from gateway.__main__ import main

conversation._SERVES_SECONDS = 0.3
main()
"""


@asynccontextmanager
async def steady_clients(gateway: Restartable) -> AsyncIterator[list[int]]:
    """Clients on new connections all the time; the statuses of their answers."""
    statuses, is_over = list[int](), asyncio.Event()

    async def user() -> None:
        while not is_over.is_set():
            statuses.append((await gateway.ask(chat())).status)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(user())
        try:
            yield statuses
        finally:
            is_over.set()


async def goes_on(gateway: Restartable) -> None:
    """The first process serves on all ports, has its batches, and can be replaced."""
    first = gateway.processes[0]
    assert first.poll() is None
    async with asyncio.timeout(30), await gateway.client() as client:
        await client.send(request(b"", method=b"GET", target=b"/v1/batches"))
        while (answer := await client.answer()).status == 503:  # the files are opened after the ports
            assert answer.header("retry-after")
            await client.send(request(b"", method=b"GET", target=b"/v1/batches"))
        assert answer.status == 200
    assert (await gateway.asks_admin("/admin/backends", b"GET")).status == 200
    assert (await gateway.asks_admin("/admin/reload")).status == 200
    new = await gateway.restart()
    await gateway.ended(first.pid)
    assert (await gateway.ask(chat())).status == 200
    assert new != first.pid


@pytest.mark.parametrize("last", ["connected", "hello", "offer", "ready", "go", "lent"])
async def test_a_new_process_may_be_killed_at_each_step(last: str, backend: ScriptedBackend, tmp_path: Path) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend, batches={"path": str(tmp_path / "batches")}) as gateway:
        async with steady_clients(gateway) as statuses:
            address = address_of(gateway.file, "127.0.0.1", gateway.port).hex()
            peer = await asyncio.create_subprocess_exec(sys.executable, "-c", PEER, address, last)
            assert await peer.wait() == -9
            count = len(statuses)
            await holds(lambda: len(statuses) > count + 20, "clients are served")
        assert set(statuses) == {200}
        assert not gateway.events("handed_over")
        await goes_on(gateway)


@pytest.mark.parametrize("step", ["go", "serves"])
async def test_a_real_one_may_be_killed_when_it_has_the_place(
    step: str, backend: ScriptedBackend, tmp_path: Path
) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend, batches={"path": str(tmp_path / "batches")}) as gateway:
        command = [sys.executable, "-c", DIES, step, "serve", "-c", str(gateway.file)]
        for _ in range(2):
            new = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
            assert await new.wait() == -9
            await holds(lambda: not gateway.processes[0].poll(), "the first one lives")
            assert (await gateway.ask(chat())).status == 200
        await goes_on(gateway)


async def test_one_that_hangs_after_go_is_ended(backend: ScriptedBackend, tmp_path: Path) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend) as gateway:
        command = [sys.executable, "-c", IMPATIENT, "serve", "-c", str(gateway.file)]
        impatient = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
        await gateway.ended(gateway.processes[0].pid)  # it has taken over
        async with steady_clients(gateway) as statuses:
            address = address_of(gateway.file, "127.0.0.1", gateway.port).hex()
            peer = await asyncio.create_subprocess_exec(sys.executable, "-c", PEER, address, "hangs")
            assert await peer.wait() == -9
            count = len(statuses)
            await holds(lambda: len(statuses) > count + 20, "clients are served")
        assert set(statuses) == {200}
        impatient.terminate()
        assert await impatient.wait() == 0
