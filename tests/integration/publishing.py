"""Chat engines that publish their KV events, with small caches that can be emptied: simulated ones, or real vLLM."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

from loadtest.servers.processes import free_ports
from loadtest.vllm_cpu.process import VllmOptions, VllmProcess
from tests.integration.fleet import CHAT_MODEL, MODELS, print_progress, simulated_engine
from tests.integration.gateway_process import Gateway
from tests.integration.observed import eventually, read
from tests.integration.predictions import BLOCK_TOKENS

CACHE_BLOCKS = 160
CONTEXT_TOKENS = 2048
LOOKS = 8  # at what is known, 20 ms apart


class Publishing(Protocol):
    """One engine."""

    @property
    def url(self) -> str:
        """Where it serves."""

    @property
    def name(self) -> str:
        """Its name, as the gateway gives it by default."""

    @property
    def events(self) -> dict[str, str]:
        """Where its events are, as a backend's configuration has it."""

    async def restart(self) -> None:
        """Become another process at the same ports; returns once it serves."""


@dataclass(frozen=True)
class SimOptions:
    """How a simulated engine is started."""

    ranks: int = 1
    cache_blocks: int = CACHE_BLOCKS
    replay: bool = True
    flags: Sequence[str] = ()
    ports: Sequence[int] = field(init=False)  # of the events, then of their replay

    def __post_init__(self) -> None:
        object.__setattr__(self, "ports", ports_in_a_row(2 * self.ranks)[:: self.ranks])

    def command_line(self) -> list[str]:
        """With /sim/*, ten times as fast as the real one."""
        sizes = ["--max-model-len", str(CONTEXT_TOKENS), "--block-size", str(BLOCK_TOKENS)]
        sizes += ["--kv-tokens", str(self.cache_blocks * BLOCK_TOKENS), "--data-parallel-size", str(self.ranks)]
        told = ["--kv-events-endpoint", f"tcp://*:{self.ports[0]}"]
        told += ["--kv-events-replay-endpoint", f"tcp://*:{self.ports[1]}"] if self.replay else []
        return ["--model", CHAT_MODEL, "--control", "--time-scale", "0.1", *sizes, *told, *self.flags]


@dataclass(frozen=True)
class Simulated:
    """A simulated engine, which also takes faults."""

    url: str
    options: SimOptions

    @property
    def name(self) -> str:
        """Its name, as the gateway gives it by default."""
        return urlsplit(self.url).netloc

    @property
    def events(self) -> dict[str, str]:
        """Where its events are, as a backend's configuration has it."""
        endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in self.options.ports)
        return {"endpoint": endpoint, **({"replay": replay} if self.options.replay else {})}

    async def restart(self) -> None:
        """At once."""
        await post(f"{self.url}/sim/restart")

    async def faults(self, **faults: Any) -> None:
        """From now on, these and no others."""
        await post(f"{self.url}/sim/faults", faults)


class Real:
    """A vLLM process."""

    def __init__(self, options: VllmOptions, log: Path) -> None:
        self._log = log
        self._process = VllmProcess(options, log, print_progress)

    @property
    def url(self) -> str:
        """Where it serves."""
        return self._process.url

    @property
    def name(self) -> str:
        """Its name, as the gateway gives it by default."""
        return urlsplit(self.url).netloc

    @property
    def events(self) -> dict[str, str]:
        """Where its events are, as a backend's configuration has it."""
        return {"endpoint": self._process.kv_events_endpoint, "replay": self._process.kv_replay_endpoint}

    def start(self) -> None:
        """Start it; returns at once."""
        self._process.start()

    def wait_ready(self) -> None:
        """Return once it serves."""
        self._process.wait_ready()

    def stop(self) -> None:
        """End it."""
        self._process.stop()

    async def restart(self) -> None:
        """Takes as long as a start."""
        await asyncio.to_thread(self._process.stop)
        self._process = VllmProcess(self._process.options, self._log, print_progress)
        self._process.start()
        await asyncio.to_thread(self._process.wait_ready)


def ports_in_a_row(count: int) -> list[int]:
    """Free ports that follow each other, as ranks want them."""
    while True:
        [first] = free_ports(1)
        try:
            with ExitStack() as held:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("", port))
        except OSError:
            continue
        return list(range(first, first + count))


@contextmanager
def simulated_engines(logs: Path, *options: SimOptions) -> Iterator[list[Simulated]]:
    """One for each."""
    with ExitStack() as stack:
        yield [
            Simulated(stack.enter_context(simulated_engine(logs, *each.command_line())).url, each) for each in options
        ]


@contextmanager
def real_engines(logs: Path, count: int) -> Iterator[list[Real]]:
    """vLLM engines with small caches and their development endpoints; they start side by side."""
    options = VllmOptions(
        MODELS / CHAT_MODEL,
        block_size_tokens=BLOCK_TOKENS,
        max_model_len_tokens=CONTEXT_TOKENS,
        flags=("--num-gpu-blocks-override", str(CACHE_BLOCKS + 1)),  # the first one is never given out
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    )
    engines = [Real(options, logs / f"vllm-events-{number}.log") for number in range(count)]
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield engines


def in_front_of(engines: Sequence[Publishing], **sections: Any) -> dict[str, Any]:
    """A gateway's configuration with these engines, which it looks at often."""
    return {
        "backends": [{"url": engine.url} for engine in engines],
        "health": {"probe_interval_seconds": 0.5},
        **sections,
    }


async def post(url: str, document: Any = None) -> Any:
    """What a JSON document is answered with."""
    async with aiohttp.ClientSession() as session, session.post(url, json=document) as answer:
        body = await answer.read()
        assert answer.status == 200, (url, answer.status, body)
        return await answer.json(content_type=None) if body else None


async def get(url: str) -> Any:
    """A JSON document."""
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200, (url, answer.status)
        return await answer.json()


async def sent_past_the_gateway(engine: Publishing, prompt: Sequence[int]) -> None:
    """Somebody else's prompt."""
    body = {"model": CHAT_MODEL, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    await post(f"{engine.url}/v1/completions", body)


async def followed(gateway: Gateway, engines: int, deadline_seconds: float = 15.0) -> None:
    """Wait until all that so many engines hold is known."""

    async def all_are() -> bool:
        return await read(gateway.admin_url, "gateway_kv_events_followed") == engines

    await eventually(all_are, f"{engines} engines' events are followed", deadline_seconds)


async def streams(gateway: Gateway) -> dict[str, dict[str, Any]]:
    """Each backend's first stream of events, as /admin/backends shows it."""
    shown = (await get(f"{gateway.admin_url}/admin/backends"))["backends"]
    return {backend["name"]: backend["kv_events"][0] for backend in shown if backend["kv_events"]}


async def caught_up(gateway: Gateway) -> None:
    """Wait until no more events come of what the engines have done."""
    looks: list[list[object]] = []

    async def nothing_new() -> bool:
        looks.append([(each["messages"], each["resident_blocks"]) for each in (await streams(gateway)).values()])
        return len(looks) > LOOKS and all(look == looks[-1] for look in looks[-LOOKS:])

    await eventually(nothing_new, "all events are known")


async def blocks_become(gateway: Gateway, engine: Publishing, blocks: int) -> None:
    """Wait until the gateway knows that the engine holds so many blocks."""

    async def so_many() -> bool:
        return await read(gateway.admin_url, "gateway_kv_events_blocks", backend=engine.name) == blocks

    await eventually(so_many, f"{engine.name} is known to hold {blocks} blocks")


async def hit_becomes(gateway: Gateway, engine: Publishing, prompt: Sequence[int], tokens: int) -> None:
    """Wait until the gateway expects so many tokens of the prompt in the engine's cache."""
    body = {"model": CHAT_MODEL, "prompt": list(prompt)}

    async def so_many() -> bool:
        told = await post(f"{gateway.admin_url}/admin/route", body)
        [hit] = [each["hit_tokens"] for each in told["backends"] if each["backend"] == engine.name]
        return bool(hit == tokens)

    await eventually(so_many, f"{tokens} tokens of a prompt are expected on {engine.name}")
