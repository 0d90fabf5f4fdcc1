"""What following KV events costs the gateway: `python -m tests.bench.kv_events`.

Engines in another process publish what vLLM publishes at full prefill speed: each step stores the blocks of some
prompts, and evicts as many, one event for each evicted block. Here they are followed as in the gateway, beside an event
loop that has nothing else to do but to tick every millisecond. Told are the CPU shares of the loop's thread and of the
reader's (which is its share of the interpreter, too), how late the ticks are, and the longest single update.
"""

import asyncio
import gc
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from random import Random
from typing import Annotated

import msgspec
import typer
import uvloop
import zmq

from gateway.features.exact.endpoints import Source
from gateway.features.exact.feed import KvEvents
from gateway.features.exact.index import ExactIndex
from loadtest.report.statistics import percentile
from loadtest.servers.processes import free_ports

BLOCK_TOKENS = 16
STEP_TOKENS = 8192
PROMPT_BLOCKS = 64
CYCLE_STEPS = 80  # after half of it a block is evicted
WARM_UP_SPEED = 8.0  # the caches are filled faster than they are used
TICK_SECONDS = 0.001

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


class Timed:
    """Applies events as the gateway does, and measures each update."""

    def __init__(self) -> None:
        self.index = ExactIndex()
        self.keys = 0
        self.updates = 0
        self.longest_seconds = 0.0
        self.spent_seconds = 0.0
        self.live: set[int] = set()

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.keys = self.updates = 0
        self.longest_seconds = self.spent_seconds = 0.0

    def changed(self, engine: int, added: Sequence[int], removed: Sequence[int], resident_tokens: int) -> None:
        started = time.thread_time()
        self.index.update(engine, added, removed)
        took = time.thread_time() - started
        self.spent_seconds += took
        self.longest_seconds = max(self.longest_seconds, took)
        self.keys += len(added) + len(removed)
        self.updates += 1

    def cleared(self, engine: int) -> None:
        """Not expected here."""

    def state(self, engine: int, live: bool, whole: bool) -> None:
        self.index.set_live(engine, live)
        self.live.add(engine)


def cycle_of(engine: int) -> list[bytes]:
    """One message for each step of an engine's life, which then begins again."""
    blocks, random = STEP_TOKENS // BLOCK_TOKENS, Random(engine)
    payloads = []
    for step in range(CYCLE_STEPS):
        gone = (step - CYCLE_STEPS // 2) % CYCLE_STEPS
        events: list[dict[str, object]] = [
            {"type": "BlockRemoved", "block_hashes": [_hash(engine, gone, block)], "medium": "GPU", "group_idx": 0}
            for block in range(blocks)
        ]
        for first in range(0, blocks, PROMPT_BLOCKS):
            hashes = [_hash(engine, step, block) for block in range(first, first + PROMPT_BLOCKS)]
            tokens = [random.randrange(128_000) for _ in range(PROMPT_BLOCKS * BLOCK_TOKENS)]
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": hashes,
                    "parent_block_hash": None,
                    "token_ids": tokens,
                    "block_size": BLOCK_TOKENS,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [None] * PROMPT_BLOCKS,
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            )
        payloads.append(msgspec.msgpack.encode([time.monotonic(), events, 0]))
    return payloads


def _hash(engine: int, step: int, block: int) -> int:
    return ((engine << 40 | step << 20 | block) * 0x9E3779B97F4A7C15) & (1 << 64) - 1


@app.command("publish", hidden=True)
def publish(ports: str, tokens_per_second: float, seconds: float) -> None:
    """The engines: one publisher for each port."""
    context = zmq.Context()
    sockets = []
    for port in ports.split(","):
        socket = context.socket(zmq.PUB)
        socket.set_hwm(100_000)
        socket.bind(f"tcp://127.0.0.1:{port}")
        sockets.append(socket)
    cycles = [cycle_of(engine) for engine in range(len(sockets))]
    print("ready", flush=True)  # noqa: T201
    sys.stdin.readline()
    step_seconds = STEP_TOKENS / tokens_per_second / len(sockets)
    due, turn = time.monotonic(), 0
    ends = due + seconds
    while due < ends:
        time.sleep(max(0.0, due - time.monotonic()))
        step, engine = divmod(turn, len(sockets))
        sockets[engine].send_multipart([b"", step.to_bytes(8, "big"), cycles[engine][step % CYCLE_STEPS]])
        turn += 1
        due += step_seconds if step > CYCLE_STEPS // 2 else step_seconds / WARM_UP_SPEED
    time.sleep(0.5)
    context.destroy(linger=0)


@app.command("run")
def run(
    engines: Annotated[int, typer.Option(min=1, help="Engines at full load.")] = 8,
    tokens_per_second: Annotated[float, typer.Option(min=1, help="Prefill speed of each.")] = 35_000,
    seconds: Annotated[float, typer.Option(min=1, help="Measured time.")] = 10,
) -> None:
    """Follow engines under full load, and print what it costs."""
    gc.set_threshold(50_000, 20, 50)  # as the gateway does
    uvloop.run(_run(engines, tokens_per_second, seconds))


async def _run(engines: int, tokens_per_second: float, seconds: float) -> None:
    ports = free_ports(engines)
    command = [sys.executable, "-m", "tests.bench.kv_events", "publish", ",".join(map(str, ports))]
    warm_up_seconds = CYCLE_STEPS / 2 * STEP_TOKENS / tokens_per_second / WARM_UP_SPEED + 1
    command += [str(tokens_per_second), str(seconds + warm_up_seconds + 2)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        await asyncio.to_thread(process.stdout.readline)
        idle = await _ticks(2.0)
        timed = Timed()
        async with KvEvents(timed, lambda _, rank: rank, time.monotonic) as events:
            events.subscribe(
                "bench", [Source(rank, f"tcp://127.0.0.1:{port}", None) for rank, port in enumerate(ports)]
            )
            while len(timed.live) < engines:
                await asyncio.sleep(0.01)
            process.stdin.write("\n")
            process.stdin.flush()
            await asyncio.sleep(warm_up_seconds)
            timed.reset()
            before, started = _clocks(), time.monotonic()
            late = await _ticks(seconds)
            elapsed = time.monotonic() - started
            spent = [(now - then) / elapsed for now, then in zip(_clocks(), before, strict=True)]
            lost = sum(int(status["lost_views"]) for status in events.status())
            lines = _told(engines, timed, lost, spent, elapsed, idle, late)
    finally:
        process.stdin.close()
        process.wait()
    print("\n".join(lines))  # noqa: T201


def _clocks() -> list[float]:
    """CPU seconds of this thread, of the reader's, and of the process."""
    reader = next(thread for thread in threading.enumerate() if thread.name == "kv-events")
    assert reader.ident is not None
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return [
        time.thread_time(),
        time.clock_gettime(time.pthread_getcpuclockid(reader.ident)),
        usage.ru_utime + usage.ru_stime,
    ]


async def _ticks(seconds: float) -> list[float]:
    """How late each tick of the loop was, sorted; milliseconds."""
    now = time.perf_counter()
    ends, late = now + seconds, []
    while now < ends:
        await asyncio.sleep(TICK_SECONDS)
        began, now = now, time.perf_counter()
        late.append((now - began - TICK_SECONDS) * 1000)
    return sorted(late)


def _told(
    engines: int, timed: Timed, lost: int, spent: list[float], elapsed: float, idle: list[float], late: list[float]
) -> list[str]:
    loop, reader, process = spent
    return [
        f"{engines} engines, {timed.keys / elapsed:,.0f} keys/s applied in {timed.updates / elapsed:,.0f} updates/s; "
        f"{len(timed.index):,} keys held; views lost: {lost}",
        f"applying: {timed.spent_seconds / elapsed:.2%} of the time; "
        f"longest update {timed.longest_seconds * 1000:.2f} ms",
        f"CPU: loop's thread {loop:.1%} (ticks included), reader's thread {reader:.1%}, process {process:.1%}",
        f"ticks late, ms, without events: {_percentiles(idle)}",
        f"ticks late, ms, with events:    {_percentiles(late)}",
    ]


def _percentiles(ordered: list[float]) -> str:
    return ", ".join(f"p{percent:g} {percentile(ordered, percent):.2f}" for percent in (50, 99, 99.9, 100))


if __name__ == "__main__":
    app()
