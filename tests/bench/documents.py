"""`python -m tests.bench documents`: one long rerank request, by one engine and by two through the gateway."""

import json
import random
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from loadtest.servers.server import ask, gateway_server, simulated_engine

_MODEL = "ranks"
_LIKE_A_GPU = ("--embedding", "--preset", "h100-8b", "--time-scale", "0.25")
_WAYS = ("one engine", "two engines, coalesce: false", "two engines")


def _ask(url: str, body: bytes) -> float:
    """Seconds until the whole answer is there."""
    started = time.perf_counter()
    ask(f"{url}/rerank", body, 60.0)
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
        flags = ("--model", _MODEL, *_LIKE_A_GPU)
        engines = [
            stack.enter_context(simulated_engine(flags, directory / f"engine-{number}.log")).url for number in range(2)
        ]
        urls = [engines[0]]
        for coalesce in (False, True):
            config = {
                "server": {"access_log": False},
                "backends": [{"url": url} for url in engines],
                "health": {"slow_start_seconds": 0},
                "embeddings": {"coalesce": coalesce},
            }
            gateway = gateway_server(config, directory / f"coalesce-{coalesce}.log")
            urls.append(stack.enter_context(gateway).url)
        for turn in range(repetitions + 2):  # of which two to warm up
            for way, url in zip(_WAYS, urls, strict=True):
                seconds = _ask(url, body)
                if turn > 1:
                    taken[way].append(seconds)
    typer.echo("| way | p50 ms | least ms |\n|---|--:|--:|")
    for way, all_seconds in taken.items():
        typer.echo(f"| {way} | {median(all_seconds) * 1000:.0f} | {min(all_seconds) * 1000:.0f} |")
