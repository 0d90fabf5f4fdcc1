"""Standard output and error whose reader is gone, hangs, or has no room: serving goes on, and ends in good order."""

import asyncio
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.clients import chat, request
from tests.fault.gateway_process import GatewayProcess, gateway_process
from tests.scripted import ScriptedBackend
from tests.scripts import stream, until


def no_room_for_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


@contextmanager
def reader_gone(_: Path) -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def reader_hangs(_: Path) -> Iterator[int]:
    """A pipe that is full already, which nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


@contextmanager
def reader_hangs_without_blocking(_: Path) -> Iterator[int]:
    """The same, left non-blocking by another process that shares it."""
    with reader_hangs(_) as writer:
        os.set_blocking(writer, False)
        yield writer


@contextmanager
def full_disk(_: Path) -> Iterator[int]:
    file = os.open("/dev/full", os.O_WRONLY)
    yield file
    os.close(file)


@contextmanager
def full_quota(folder: Path) -> Iterator[int]:
    """With `no_room_for_files`."""
    file = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    yield file
    os.close(file)


async def serves(gateway: GatewayProcess) -> None:
    async with await gateway.client() as client:
        await client.send(request(chat()))
        assert (await client.answer()).status == 200
    assert (await gateway.get("/livez")).status == 200


@pytest.mark.parametrize(
    ("sink", "loses"),
    [(reader_gone, True), (full_disk, True), (full_quota, True), (reader_hangs, False),
     (reader_hangs_without_blocking, False)],
)  # fmt: skip
async def test_a_sink_that_takes_nothing_costs_lines_and_nothing_else(
    sink: Callable[[Path], AbstractContextManager[int]], loses: bool, tmp_path: Path, backend: ScriptedBackend
) -> None:
    with sink(tmp_path) as end:
        before = no_room_for_files if sink is full_quota else None
        async with gateway_process(tmp_path, backend, stdout=end, stderr=end, before=before) as gateway:
            await serves(gateway)
            gateway.process.send_signal(signal.SIGUSR1)  # which is logged
            async with asyncio.timeout(10):
                while loses and not await gateway.metric("gateway_log_dropped_lines_total"):
                    await asyncio.sleep(0.05)
                while loses and not await gateway.metric("gateway_access_log_dropped_lines_total"):
                    await asyncio.sleep(0.05)
            await serves(gateway)
            gateway.process.terminate()
            assert await gateway.ended() == 0


async def test_standard_streams_that_were_closed_before_the_start_are_done_without(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    def close() -> None:
        os.close(1)
        os.close(2)

    async with gateway_process(tmp_path, backend, before=close) as gateway:
        await serves(gateway)
        gateway.process.terminate()
        assert await gateway.ended() == 0


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children take SIGINT, even if this process runs in the background of a shell, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
async def test_ctrl_c_that_also_ends_the_reader_of_the_log_drains(tmp_path: Path, backend: ScriptedBackend) -> None:
    """As in a shell: `gateway serve 2>&1 | tee log`, then Ctrl-C, which both get."""
    proceed = asyncio.Event()
    first, *rest = stream()
    backend.plays(first, until(proceed), *rest)
    with (tmp_path / "log").open("wb") as log:
        tee = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log, process_group=0)
    assert tee.stdin is not None
    with tee.stdin as pipe:
        async with (
            gateway_process(tmp_path, backend, stdout=pipe, stderr=pipe, process_group=tee.pid) as gateway,
            await gateway.client() as client,
        ):
            await client.send(request(chat(stream=True)))
            async with asyncio.timeout(10):
                await backend.touched.wait()
            os.killpg(tee.pid, signal.SIGINT)
            assert await asyncio.to_thread(tee.wait, 10) == -signal.SIGINT
            proceed.set()
            answer = await client.answer()
            assert answer.is_done
            assert await gateway.ended() == 0


async def test_lines_that_were_waiting_are_written_before_the_end(tmp_path: Path, backend: ScriptedBackend) -> None:
    with (tmp_path / "log").open("wb") as log:
        async with gateway_process(tmp_path, backend, stdout=log, stderr=log) as gateway:
            await serves(gateway)
            gateway.process.terminate()
            assert await gateway.ended() == 0
    written = (tmp_path / "log").read_text()
    for word in ('"event": "serving"', '"outcome":"completed"', '"event": "draining"', '"event": "stopped"'):
        assert word in written


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
async def test_a_signal_that_means_nothing_costs_no_answer(
    number: signal.Signals, tmp_path: Path, backend: ScriptedBackend
) -> None:
    proceed = asyncio.Event()
    first, *rest = stream()
    backend.plays(first, until(proceed), *rest)
    with (tmp_path / "log").open("wb") as log:
        async with gateway_process(tmp_path, backend, stderr=log) as gateway, await gateway.client() as client:
            await client.send(request(chat(stream=True)))
            async with asyncio.timeout(10):
                await backend.touched.wait()
            gateway.process.send_signal(number)
            assert (await gateway.get("/readyz")).status == 200
            proceed.set()
            assert (await client.answer()).is_done
            gateway.process.terminate()
            assert await gateway.ended() == 0
    assert f'"signal": "{number.name}"' in (tmp_path / "log").read_text()
