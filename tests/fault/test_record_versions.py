"""The table with whatever in it, and gateways of two versions at once: real processes, a real Redis or Valkey.

`tests/unit/coordination/test_records.py` has the same in virtual time, for every field and value.
"""

import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import hiredis
import pytest

from tests.fault.counting_engine import CountingEngine, Load, more, until
from tests.fault.gateway_process import GatewayProcess, gateway_process
from tests.redis_server import RedisServer, redis_server
from tests.unit.coordination.test_records import HOSTILE, WHOLE, forged

pytestmark = pytest.mark.timeout(150)
CAP = 6
_ANSWER_SECONDS = 0.1
THIS = ("gateway",)
FIRST, LATER = ("tests.fault.other_version", "first"), ("tests.fault.other_version", "later")


class Fleet:
    """Gateways of several versions before one engine, each with a load."""

    def __init__(self, folder: Path, server: RedisServer, engine: CountingEngine, stack: AsyncExitStack) -> None:
        self._folder, self._server, self._engine, self._stack = folder, server, engine, stack
        self.gateways: list[tuple[GatewayProcess, Load]] = []
        self._started = 0

    def log(self, number: int = 0) -> bytes:
        return (self._folder / f"{number}.log").read_bytes()

    async def start(self, version: tuple[str, ...]) -> None:
        folder = self._folder / str(self._started)
        folder.mkdir()
        log = self._stack.enter_context((self._folder / f"{self._started}.log").open("wb"))
        self._started += 1
        engine: Any = self._engine
        sections = {
            "coordination": {"url": self._server.url},
            "health": {"slow_start_seconds": 0, "probe_interval_seconds": 0.3},
            "admission": {"adaptive": False},
            "backends": [{"url": engine.url, "max_in_flight": CAP}],
        }
        build = {} if version == THIS else {"GATEWAY_PURE": "1"}  # compiled code cannot be made another version
        process = gateway_process(folder, engine, stderr=log, sections=sections, command=version, environment=build)
        gateway = await self._stack.enter_async_context(process)
        self.gateways.append((gateway, Load(gateway, 2)))
        await self.know_of_each_other()

    async def know_of_each_other(self) -> None:
        async def they_do() -> bool:
            return all([await gateway.metric("gateway_replicas") == len(self.gateways) for gateway, _ in self.gateways])

        await until(they_do, "they know of each other")

    async def stop(self) -> None:
        """Stop the oldest one, as a rolling update does."""
        gateway, load = self.gateways.pop(0)
        await load.finish()
        gateway.process.send_signal(signal.SIGTERM)
        assert await gateway.ended() == 0
        await self.know_of_each_other()
        assert (load.failed, load.cut) == ([], 0)

    async def serve(self, least: int = CAP) -> None:
        """Each goes on; while all lack slots, the engine has its cap and no more, or so many at least."""
        for _, load in self.gateways:
            await more(load)
        crowds = [Load(gateway) for gateway, _ in self.gateways]
        answered = self._engine.answered + 10 * CAP
        await until(lambda: self._has_answered(answered), "the engine is busy")
        for crowd in crowds:
            await crowd.finish()
        assert least <= self._engine.peak <= CAP
        assert [load.failed + crowd.failed for (_, load), crowd in zip(self.gateways, crowds, strict=True)] == [
            [] for _ in crowds
        ]
        assert [load.cut for _, load in self.gateways] == [0 for _ in crowds]

    async def _has_answered(self, count: int) -> bool:
        return self._engine.answered >= count


@pytest.mark.parametrize(("before", "after"), [(FIRST, THIS), (THIS, LATER), (LATER, THIS)])
async def test_one_version_replaces_another_and_no_request_fails(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    with redis_server(tmp_path) as server:
        async with CountingEngine(_ANSWER_SECONDS).running() as engine, AsyncExitStack() as stack:
            fleet = Fleet(tmp_path, server, engine, stack)
            await fleet.start(before)
            await fleet.start(before)
            for _ in range(2):
                await fleet.start(after)
                await fleet.serve()
                await fleet.stop()
                await fleet.serve()
            for _, load in fleet.gateways:
                await load.finish()
            for number in range(4):
                assert b"coordination_lost" not in fleet.log(number)
                assert b"replica_unreadable" not in fleet.log(number)


def table(server: RedisServer, *words: str | bytes) -> None:
    server.ask(hiredis.pack_command((words[0], "{gateway}:table", *words[1:])))


async def test_whatever_is_in_the_table_each_request_is_served(tmp_path: Path) -> None:
    """First what cannot be read, then forged blocks; a gateway that starts then serves as well."""
    with redis_server(tmp_path) as server:
        async with CountingEngine(_ANSWER_SECONDS).running() as engine, AsyncExitStack() as stack:
            fleet = Fleet(tmp_path, server, engine, stack)
            await fleet.start(THIS)
            gateway = fleet.gateways[0][0]
            for number, data in enumerate([*WHOLE.values(), forged((3,), [])]):
                table(server, "HSET", f"junk{number}", data)
            table(server, "HSET", b"\xff\xfe", b"junk")
            await silent(gateway, len(WHOLE) + 2)
            await fleet.serve(CAP // 2)
            for number, value in enumerate(HOSTILE.values()):
                table(server, "HSET", f"forged{number}", forged((3, "e0", 0, 0), value))
            await silent(gateway, len(WHOLE) + 2 + len(HOSTILE))
            await fleet.serve(CAP // 2)
            await fleet.start(THIS)
            await fleet.serve(CAP // 2)
            await until(lambda: is_up(gateway, 1), "it goes on renewing its blocks")
            assert fleet.log(0).count(b"replica_unreadable") == fleet.log(1).count(b"replica_unreadable") == 1
            for _, load in fleet.gateways:
                await load.finish()


async def silent(gateway: GatewayProcess, count: int) -> None:
    async def so_many() -> bool:
        return await gateway.metric("gateway_silent_replicas") == count

    await until(so_many, f"{count} silent replicas")


SPOILED: dict[str, list[tuple[str | bytes, ...]]] = {
    "another type": [("DEL",), ("SET", "1")],
    "a version that is no text": [("HSET", ":version", b"\xff")],
    "too many fields": [
        ("HSET", *[word for number in range(5000) for word in (f"{turn}.{number}", "junk")]) for turn in range(20)
    ],
}


@pytest.mark.parametrize("commands", SPOILED.values(), ids=SPOILED)
async def test_while_the_table_cannot_be_used_requests_go_on(
    tmp_path: Path, commands: list[tuple[str | bytes, ...]]
) -> None:
    with redis_server(tmp_path) as server:
        async with CountingEngine(_ANSWER_SECONDS).running() as engine, AsyncExitStack() as stack:
            fleet = Fleet(tmp_path, server, engine, stack)
            await fleet.start(THIS)
            gateway, load = fleet.gateways[0]
            for command in commands:
                table(server, *command)
            await until(lambda: is_up(gateway, 0), "its blocks lapse")
            await fleet.serve()
            table(server, "DEL")
            await until(lambda: is_up(gateway, 1), "they are renewed")
            await fleet.serve()
            await load.finish()
            log = fleet.log()  # each loss is logged once, and so is its end
            assert log.count(b"coordination_lost") == log.count(b"coordination_restored") >= 1


async def test_a_table_whose_own_fields_are_junk_is_written_anew(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with CountingEngine(_ANSWER_SECONDS).running() as engine, AsyncExitStack() as stack:
            fleet = Fleet(tmp_path, server, engine, stack)
            await fleet.start(THIS)
            for name in (":era", ":settled", ":run"):
                table(server, "HSET", name, b"\xff")
            await fleet.serve()
            await fleet.start(THIS)
            await fleet.serve()
            for _, load in fleet.gateways:
                await load.finish()


async def is_up(gateway: GatewayProcess, value: int) -> bool:
    return await gateway.metric("gateway_coordination_up") == value
