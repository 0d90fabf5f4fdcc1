"""`python -m tests.bench documents`: one long rerank request, by one engine and by two through the gateway."""

import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated
from urllib.request import ProxyHandler, Request, build_opener

import typer
import yaml

from gateway.cli.demo import free_ports
from loadtest.servers.processes import running
from tests.integration.processes import wait_until_serving

_MODEL = "ranks"
_LIKE_A_GPU = ("--embedding", "--preset", "h100-8b", "--time-scale", "0.25")
_WAYS = ("one engine", "two engines, coalesce: false", "two engines")
_direct = build_opener(ProxyHandler({}))


@contextmanager
def _served(name: str, port: int, ready: str, *command: str, logs: Path) -> Iterator[str]:
    """A server of ours, running; gives its URL."""
    url, log = f"http://127.0.0.1:{port}", logs / f"{name}.log"
    with running([sys.executable, "-m", *command], None, log) as process:
        wait_until_serving(process, url + ready, log)
        yield url


def _gateway(backends: list[str], logs: Path, *, coalesce: bool) -> tuple[int, Path]:
    port = free_ports(1)[0]
    file = logs / f"coalesce-{coalesce}.yaml"
    server = {"host": "127.0.0.1", "port": port, "admin": None, "access_log": False, "drain_delay_seconds": 0}
    config = {
        "server": server, "backends": [{"url": url} for url in backends], "health": {"slow_start_seconds": 0},
        "embeddings": {"coalesce": coalesce},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(config))
    return port, file


def _ask(url: str, body: bytes) -> float:
    """Seconds until the whole answer is there."""
    started = time.perf_counter()
    request = Request(f"{url}/rerank", body, {"content-type": "application/json"})
    with _direct.open(request, timeout=60.0) as answer:
        answer.read()
    return time.perf_counter() - started


def documents(
    count: Annotated[int, typer.Option("--documents", min=1, help="Of each request.")] = 256,
    words: Annotated[int, typer.Option(min=1, help="Of each document.")] = 100,
    repetitions: Annotated[int, typer.Option("--reps", min=1, help="Requests of each way, in turn.")] = 20,
    directory: Annotated[Path, typer.Option("--dir", help="Where logs are kept.")] = Path(".bench/documents"),
) -> None:
    """How much sooner a long list of documents is ranked by two engines; on simulated engines as fast as on a GPU."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    texts = [" ".join(f"w{rng.randrange(9999)}" for _ in range(words)) for _ in range(count)]
    body = json.dumps({"model": _MODEL, "query": "what is it about", "documents": texts}).encode()
    taken: dict[str, list[float]] = {way: [] for way in _WAYS}
    with ExitStack() as stack:
        engines = []
        for number, port in enumerate(free_ports(2)):
            told = ("loadtest", "sim", "--port", str(port), "--model", _MODEL, *_LIKE_A_GPU)
            engines.append(stack.enter_context(_served(f"engine-{number}", port, "/health", *told, logs=directory)))
        urls = [engines[0]]
        for coalesce in (False, True):
            port, file = _gateway(engines, directory, coalesce=coalesce)
            serve = ("gateway", "serve", "-c", str(file))
            urls.append(stack.enter_context(_served(file.stem, port, "/readyz", *serve, logs=directory)))
        for turn in range(repetitions + 2):  # of which two to warm up
            for way, url in zip(_WAYS, urls, strict=True):
                seconds = _ask(url, body)
                if turn > 1:
                    taken[way].append(seconds)
    typer.echo("| way | p50 ms | least ms |\n|---|--:|--:|")
    for way, all_seconds in taken.items():
        typer.echo(f"| {way} | {median(all_seconds) * 1000:.0f} | {min(all_seconds) * 1000:.0f} |")
