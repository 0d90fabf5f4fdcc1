"""A gateway that has no file descriptor left: backends are not to blame, and everything goes on afterwards."""

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import orjson
import pytest

from gateway.core.backends.health import ProbeResult
from gateway.core.backends.settings import BackendConfig
from gateway.core.backends.vllm_api import ControlClient
from tests.clients import Client, chat, request
from tests.fault.gateway_process import gateway_process
from tests.fault.rig import QUICK, holds, running
from tests.scripted import ScriptedBackend

LIMIT = 96
ALLOWED = (LIMIT - 32 - 16) // 2
READY = b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n"


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open nothing while the block runs."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_backends_stay_up_while_the_gateway_can_open_nothing_and_all_goes_on_afterwards(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[ProbeResult] = []
    probe = ControlClient.probe

    async def watched(client: ControlClient, one: BackendConfig) -> tuple[ProbeResult, str]:
        result, reason = await probe(client, one)
        probes.append(result)
        return result, reason

    monkeypatch.setattr(ControlClient, "probe", watched)
    async with running(backend) as under_test, await under_test.client() as client:
        with no_descriptor_left():
            for _ in range(7):  # as many failures as eject a backend, and more
                await client.send(request(chat()))
                answer = await client.answer()
                assert (answer.status, answer.error["code"]) == (503, "out_of_file_descriptors")
                assert answer.header("retry-after")
            probes.clear()
            await holds(lambda: len(probes) >= 5, "more probes than take a backend down")
            assert set(probes) == {ProbeResult.UNSENT}
            assert under_test.state(backend) == "up"
        await client.send(request(chat()))
        assert (await client.answer()).status == 200
        probes.clear()
        await holds(lambda: ProbeResult.OK in probes, "probes are answered again")
        assert under_test.state(backend) == "up"
        assert under_test.outcomes == {"out_of_descriptors": 7, "completed": 1}
        reasons = [event["reason"] for event in under_test.events if event["event"] == "backend_question_failed"]
        assert reasons.count("the gateway has reached its limit of open files (nofile)") == 1


@asynccontextmanager
async def started(folder: Path, backend: ScriptedBackend) -> AsyncIterator[tuple[int, Path]]:
    """A gateway whose soft limit of open files is 64, and whose hard limit is LIMIT: its port and its log."""
    log = folder / "gateway.log"
    sections = {name: section for name, section in QUICK.items() if name != "server"}
    with log.open("wb") as sink:
        async with gateway_process(
            folder, backend, stdout=sink, stderr=sink, sections=sections,
            before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, LIMIT)),
        ) as gateway:  # fmt: skip
            yield gateway.port, log
            assert gateway.process.poll() is None
            gateway.process.terminate()
            assert await gateway.ended() == 0, log.read_text()


async def test_idle_clients_leave_descriptors_for_backends_and_requests(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with started(tmp_path, backend) as (port, log):
        await holds(lambda: b'"state": "up"' in log.read_bytes(), "it serves")
        lowered = next(line for line in map(orjson.loads, log.read_bytes().splitlines()) if "nofile_limit" in line)
        assert (lowered["event"], lowered["max_connections"], lowered["nofile_limit"]) == (
            "max_connections_lowered", ALLOWED, LIMIT,
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(await Client.connect(port)) for _ in range(ALLOWED)]
            for client in clients:
                await client.send(READY)
                assert (await client.answer()).status == 200
            for _ in range(2 * LIMIT):
                async with await Client.connect(port) as one_more:
                    await one_more.end()
            await asyncio.gather(*(client.send(request(chat())) for client in clients))
            answers = await asyncio.gather(*(client.answer() for client in clients))
            assert [answer.status for answer in answers] == [200] * ALLOWED
        assert b'"down"' not in log.read_bytes()
        assert backend.malformed == []
