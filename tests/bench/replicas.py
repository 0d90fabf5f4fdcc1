"""What several gateways before one fleet make of its prefix caches: real processes, simulated engines, round robin.

Each arm runs gateways of its own before the same kind of engines, and users who send the next prompt when the last
answer is there, each to the next gateway in turn. A prompt is one of a few long prefixes with an end of its own.
Hit rate: prompt tokens that the engines had cached, as they report it. CPU: of the gateways' processes together, for a
request and for a second; `--users 0` shows what they spend while they do nothing.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import aiohttp
import pytest
import typer

from loadtest.servers.processes import cpu_seconds_between, cpu_times
from loadtest.servers.server import simulated_engine
from tests.bench.alone import alone, fail, say
from tests.bench.gateway_process import GatewayProcess, serving
from tests.bench.place import Place
from tests.redis_server import redis_server, server_program

_MODEL = "sim"
_CAP = 8
_KV_TOKENS = 20_000
_PREFIX_CHARS = 4096  # 1,024 tokens, as the simulated engine counts
_LEAST_SHARE = 0.97  # of a single gateway's figures
HEAD = (
    "| gateways | requests | hit rate | requests/s | p50 ms | CPU, ms a request | CPU, ms a second | failed |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|"
)


@dataclass(frozen=True)
class Load:
    """The users and their prompts. `time_scale`: of the engines; 1 = as fast as on a GPU."""

    users: int = 28
    prefixes: int = 48
    output_tokens: int = 64
    streams: bool = True
    time_scale: float = 4.0
    warm_up_seconds: float = 20.0
    seconds: float = 60.0


@dataclass(frozen=True)
class Arm:
    """So many gateways. `shares`: they are coordinated; otherwise each uses `cap` slots of each engine."""

    replicas: int
    shares: bool
    cap: int = _CAP

    @property
    def name(self) -> str:
        if self.replicas == 1:
            return "1"
        how = "coordinated" if self.shares else f"each on its own, {self.cap} slots an engine"
        return f"{self.replicas}, {how}"


@dataclass
class Seen:
    """What the users of one arm saw."""

    arm: Arm
    prompt_tokens: int = 0
    cached_tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    failed: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def rate(self) -> float:
        return len(self.latencies) / max(self.seconds, 1e-9)

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_seconds / max(1, len(self.latencies))

    def row(self) -> str:
        p50 = sorted(self.latencies)[len(self.latencies) // 2] * 1000 if self.latencies else 0.0
        cpu = f"{self.cpu_ms:.2f}" if self.latencies else "-"
        a_second = 1000 * self.cpu_seconds / max(self.seconds, 1e-9)
        figures = f"{self.hit_rate:.1%} | {self.rate:.1f} | {p50:.0f} | {cpu} | {a_second:.1f} | {self.failed}"
        return f"| {self.arm.name} | {len(self.latencies)} | {figures} |"


def problems(seen: list[Seen]) -> list[str]:
    """The bars that coordinated gateways missed, against a single one; empty = none."""
    single = [each for each in seen if each.arm.replicas == 1]
    found = [f"{each.arm.name}: {each.failed} requests failed" for each in seen if each.failed]
    for each in seen if single else ():
        if not each.arm.shares:
            continue
        for what, value, alone_value in (
            ("hit rate", each.hit_rate, sum(one.hit_rate for one in single) / len(single)),
            ("throughput", each.rate, sum(one.rate for one in single) / len(single)),
        ):
            if value < _LEAST_SHARE * alone_value:
                found.append(f"{each.arm.name}: {what} is {value / alone_value:.1%} of a single gateway's")
    return found


@contextmanager
def _gateways(arm: Arm, load: Load, folder: Path) -> Iterator[list[GatewayProcess]]:
    flags = ("--max-num-seqs", str(_CAP), "--kv-tokens", str(_KV_TOKENS), "--time-scale", str(load.time_scale))
    with ExitStack() as stack:
        engines = [
            stack.enter_context(simulated_engine(flags, folder / f"engine-{number}.log")).url for number in range(4)
        ]
        config: dict[str, Any] = {
            "backends": [{"url": url, "max_in_flight": arm.cap} for url in engines],
            "server": {"access_log": False},
            "health": {"slow_start_seconds": 0},
        }
        if arm.shares and arm.replicas > 1:
            config["coordination"] = {"url": stack.enter_context(redis_server(folder)).url}
        gateways = [stack.enter_context(serving(config)) for _ in range(arm.replicas)]
        for gateway in gateways:
            gateway.wait_until_up(len(engines))
        yield gateways


def measure(arm: Arm, load: Load) -> Seen:
    """One arm, with gateways and engines of its own. Raises ServerFailed, OSError."""
    with TemporaryDirectory() as folder, _gateways(arm, load, Path(folder)) as gateways:
        return asyncio.run(_measure(arm, load, gateways))


async def _measure(arm: Arm, load: Load, gateways: list[GatewayProcess]) -> Seen:
    seen, random = Seen(arm), Random(1)
    prefixes = [" ".join(f"{random.randrange(1 << 30):x}" for _ in range(600))[:_PREFIX_CHARS] for _ in range(48)]
    urls = cycle([f"http://127.0.0.1:{gateway.port}/v1/completions" for gateway in gateways])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def user(number: int) -> None:
            chance = Random(number)
            while True:
                prompt = f"{chance.choice(prefixes[: load.prefixes])} {chance.randrange(1 << 60):x}" + "x" * 200
                await _one(session, next(urls), prompt, load, seen)

        users = [asyncio.create_task(user(number)) for number in range(load.users)]
        await asyncio.sleep(load.warm_up_seconds)
        before, begun = [cpu_times(gateway.pid) for gateway in gateways], time.monotonic()
        seen.prompt_tokens = seen.cached_tokens = seen.failed = 0
        seen.latencies.clear()
        await asyncio.sleep(load.seconds)
        seen.seconds = time.monotonic() - begun
        result = Seen(arm, seen.prompt_tokens, seen.cached_tokens, [*seen.latencies], seen.failed, seen.seconds)
        after = [cpu_times(gateway.pid) for gateway in gateways]
        result.cpu_seconds = sum(map(cpu_seconds_between, before, after))
        for task in users:
            task.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    return result


async def _one(session: aiohttp.ClientSession, url: str, prompt: str, load: Load, seen: Seen) -> None:
    body: dict[str, Any] = {"model": _MODEL, "prompt": prompt, "max_tokens": load.output_tokens, "ignore_eos": True}
    if load.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    begun = time.monotonic()
    async with session.post(url, json=body) as response:
        answer = await response.read()
    if response.status != 200:
        seen.failed += 1
        await asyncio.sleep(0.1)
        return
    usage = _usage(answer, load)
    seen.latencies.append(time.monotonic() - begun)
    seen.prompt_tokens += usage["prompt_tokens"]
    seen.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _usage(answer: bytes, load: Load) -> dict[str, Any]:
    if load.streams:
        events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
        answer = next(event for event in reversed(events) if b'"usage"' in event)
    usage: dict[str, Any] = json.loads(answer)["usage"]
    return usage


def replicas(
    counts: Annotated[str, typer.Option("--replicas", help="Numbers of gateways, after a single one.")] = "2,4",
    users: Annotated[int, typer.Option(min=0, help="0 = the gateways do nothing.")] = 28,
    seconds: Annotated[float, typer.Option(help="Of each arm, after the warm-up.")] = 60.0,
    time_scale: Annotated[float, typer.Option(help="Of the engines: 1 = as fast as on a GPU.")] = 4.0,
    apart: Annotated[bool, typer.Option("--apart", help="Also gateways that are not coordinated.")] = False,
    repetitions: Annotated[int, typer.Option("--reps", min=1)] = 1,
    directory: Annotated[Path, typer.Option("--dir")] = Path(".bench"),
) -> None:
    """Compare several gateways before one fleet with a single one; exit 1 if a bar is missed."""
    load = Load(users=users, seconds=seconds, time_scale=time_scale)
    arms = [Arm(1, shares=True)]
    for count in map(int, counts.split(",")):
        arms.append(Arm(count, shares=True))
        if apart:
            arms += [Arm(count, shares=False), Arm(count, shares=False, cap=max(1, _CAP // count))]
    seen: list[Seen] = []
    try:
        server_program()
    except pytest.skip.Exception as error:
        fail(str(error))
    typer.echo(HEAD)
    with alone(Place(directory.resolve())):
        for arm in arms * repetitions:
            seen.append(measure(arm, load))
            typer.echo(seen[-1].row())
    if found := problems(seen):
        say("\n".join(found))
        raise typer.Exit(1)
