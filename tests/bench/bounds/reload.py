"""Reloads under load: a large fleet with many keys, all of whose sections change again and again."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import yaml

from tests.bench.bounds import bodies
from tests.clients import Client, request

BACKENDS = 256
KEYS = 1000
_CLIENTS = 24
_CHANGED = 64  # backends of the second configuration that the first has not, and keys
_APART_SECONDS = 0.5


def backends(engine_port: int, number: int = BACKENDS) -> list[dict[str, Any]]:
    """Many backends on one engine, which listens at all addresses of the loopback network."""
    return [{"url": f"http://127.0.{place // 250}.{place % 250 + 1}:{engine_port}"} for place in range(number)]


def keys(first: int = 0, **limits: Any) -> list[dict[str, Any]]:
    """A thousand keys from this number on. The first one of all is everywhere."""
    numbers = [0, *range(first + 1, first + KEYS)]
    return [{"name": f"key-{number}", "key": f"sk-{number}", **limits} for number in numbers]


def sections(engine_port: int, *, changed: bool) -> dict[str, Any]:
    """Two configurations that differ in most sections, in half of the backends and in all keys."""
    fleet = backends(engine_port, BACKENDS + _CHANGED)
    if not changed:
        return {"backends": fleet[:BACKENDS], "auth": {"keys": keys()}}
    grown = [{**each, "max_in_flight": 64} if place % 2 else each for place, each in enumerate(fleet[_CHANGED:])]
    return {
        "backends": grown,
        "auth": {"keys": keys(_CHANGED, weight=2, requests_per_minute=1_000_000)},
        "routing": {"policy": "least_loaded", "aging": 0.5, "index_memory_bytes": 1 << 24, "decode_weight": 2},
        "admission": {"kv_headroom": 0.9, "max_queued_requests": 9999, "adaptive": False, "comment_seconds": 5},
        "embeddings": {"max_batch_items": 16, "max_delay_seconds": 0.01},
        "health": {"slow_start_seconds": 5, "probe_interval_seconds": 3},
        "upstream": {"keep_alive_seconds": 2},
        "models": {"aliases": {f"alias-{number}": "fine" for number in range(100)}},
        "prefix_report": {"enabled": False},
    }


class Load:
    """Clients that send one request after another; counts what is answered, and what is not answered well."""

    def __init__(self, port: int) -> None:
        self.answered = self.failed = 0
        self._port = port
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send while the block runs; each request that was sent is waited for."""
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(_CLIENTS)))

    async def _client(self, number: int) -> None:
        body = orjson.dumps(
            {
                "model": "fine",
                "stream": number % 2 == 0,
                "messages": [{"role": "user", "content": f"hello {number} " * 50}],
            }
        )
        async with await Client.connect(self._port) as client:
            while not self._stopping.is_set():
                await client.send(request(body, b"authorization: Bearer sk-0"))
                answer = await client.answer()
                self.answered += 1
                self.failed += answer.status != 200 or not answer.complete


def reload_repeatedly(file: Path, port: int, admin_port: int, engine_port: int, times: int) -> tuple[Load, list[int]]:
    """The load meanwhile, and how many keys each reload changed."""
    load, changes = Load(port), list[int]()
    document = yaml.safe_load(file.read_text())
    fixed = {"server": document["server"]}
    with load.running():
        time.sleep(_APART_SECONDS)
        for turn in range(times):
            text = yaml.safe_dump({**fixed, **sections(engine_port, changed=turn % 2 == 0)})
            file.with_suffix(".new").write_text(text)
            file.with_suffix(".new").rename(file)
            changes.append(len(asyncio.run(_reload(admin_port))["changed"]))
            time.sleep(_APART_SECONDS)
    return load, changes


async def _reload(admin_port: int) -> Any:
    async with await Client.connect(admin_port) as client:
        await client.send(bodies.admin(b"/admin/reload", b""))
        return (await client.answer()).json
