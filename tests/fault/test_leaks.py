"""Nothing leaks: tens of thousands of requests, many cancelled, backends killed on the way, and all is as before."""

import asyncio
import gc
import os
import random

import pytest

from tests.clients import Client, EndOfConnection, chat, request
from tests.fault.engine_process import MODEL, EngineProcess
from tests.fault.rig import UnderTest, holds, running

REQUESTS = 20_000
WARM_UP = 5_000
AT_ONCE = 40
CANCELLED = 1 / 3
MAX_GROWTH_BYTES = 10 * 1048576


def resident_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def body(chance: random.Random) -> bytes:
    """One of many chat requests with common beginnings."""
    prompt = f"conversation {chance.randrange(50)} " * chance.randrange(1, 40)
    return request(chat(prompt, MODEL, stream=chance.random() < 0.7, max_tokens=chance.randrange(1, 24)))


async def one(client: Client, chance: random.Random, counts: dict[str, int]) -> bool:
    """One request; whether the connection can be used again."""
    data = body(chance)
    if chance.random() >= CANCELLED:
        await client.send(data)
        answer = await client.answer(30)
        ending = "answered" if answer.status == 200 and answer.complete else f"failed with {answer.status}"
        counts[ending] = counts.get(ending, 0) + 1
        return answer.complete and answer.header("connection") != "close"
    counts["cancelled"] = counts.get("cancelled", 0) + 1
    cut = len(data) if chance.random() < 0.85 else chance.randrange(1, len(data))
    await client.send(data[:cut])
    if chance.random() < 0.8:
        await asyncio.sleep(chance.random() ** 2 * 0.08)
    chance.choice([client.close, client.reset])()
    return False


async def drive(under_test: UnderTest, count: int, seed: int, counts: dict[str, int]) -> None:
    """Send this many requests over a number of connections."""
    left = count

    async def work(number: int) -> None:
        nonlocal left
        chance = random.Random(seed * 1000 + number)
        client: Client | None = None
        while left > 0:
            left -= 1
            if client is None:
                client = await under_test.client()
            try:
                good = await one(client, chance, counts)
            except EndOfConnection:
                counts["cut"] = counts.get("cut", 0) + 1
                good = False
            if not good:
                client.close()
                client = None
        if client is not None:
            client.close()

    async with asyncio.TaskGroup() as group:
        for number in range(AT_ONCE):
            group.create_task(work(number))


async def kill_now_and_then(engines: list[EngineProcess], seconds: float, kills: list[int]) -> None:
    """Kill one engine after the other and start it again."""
    for number in range(1_000_000):
        await asyncio.sleep(seconds)
        engine = engines[number % len(engines)]
        await engine.kill()
        await asyncio.sleep(0.3)
        await engine.start()
        kills.append(number)


async def idle(engine: EngineProcess) -> None:
    """The engine has nothing to do, by its own account."""
    async with await Client.connect(engine.port) as client:
        await client.send(request(method=b"GET", target=b"/metrics"))
        page = (await client.answer()).body.decode()
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        values = [line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith(name + "{")]
        assert values
        assert all(float(value) == 0 for value in values), (engine.url, name, values)


@pytest.mark.timeout(240)
async def test_nothing_is_left_of_20000_requests_a_third_of_them_cancelled_and_backends_killed() -> None:
    flags = ("--time-scale", "0.02", "--max-num-seqs", "12", "--kv-tokens", "20000")
    sections = {"routing": {"policy": "prefix"}, "upstream": {"retry_budget_fraction": 1.0}}
    counts: dict[str, int] = {}
    kills: list[int] = []
    async with (
        EngineProcess(*flags) as a,
        EngineProcess(*flags) as b,
        EngineProcess(*flags) as c,
        running(a, b, c, sections=sections, per_backend={"max_in_flight": 12}) as under_test,
    ):
        await drive(under_test, 200, 0, counts)
        await under_test.comes_to_rest(5.0)
        tasks = {task.get_name() for task in asyncio.all_tasks() if not task.get_name().startswith("Task-")}
        await drive(under_test, WARM_UP, 1, counts)
        await under_test.comes_to_rest(5.0)
        gc.collect()
        files, memory = open_files(), resident_bytes() - len(under_test.log.getvalue())

        killing = asyncio.create_task(kill_now_and_then([b, c], 0.7, kills))
        await drive(under_test, REQUESTS - WARM_UP, 2, counts)
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        for engine in (b, c):
            await engine.kill()
            await engine.start()
        await holds(lambda: all(under_test.state(each) == "up" for each in (a, b, c)), "all are back", 10)
        await under_test.comes_to_rest(5.0)

        for engine in (a, b, c):
            await idle(engine)

        gc.collect()
        grown = resident_bytes() - len(under_test.log.getvalue()) - memory
        print(counts, f"kills {len(kills)}", f"grown {grown / 1048576:.1f} MiB", under_test.outcomes)  # noqa: T201
        assert len(kills) >= 2
        assert counts["cancelled"] > REQUESTS / 4
        assert counts["answered"] > REQUESTS * 0.6
        failed = sum(count for ending, count in counts.items() if ending not in ("answered", "cancelled"))
        assert failed < 60 * (len(kills) + 1)  # what the killed engines were answering
        assert open_files() <= files + 12
        named = {task.get_name() for task in asyncio.all_tasks() if not task.get_name().startswith("Task-")}
        assert named == tasks
        assert len(asyncio.all_tasks()) < 40
        assert grown < MAX_GROWTH_BYTES
