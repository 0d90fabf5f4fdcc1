"""The engines of a comparison: started for it, or an operator's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.compare.options import CompareOptions
from loadtest.drive.sampling import page_values
from loadtest.servers.engines import Engines, Kind, running_engines
from loadtest.servers.server import get

_IDLE_SECONDS = 60.0
_POLL_SECONDS = 0.1
_PAGE_SECONDS = 5.0


@dataclass(frozen=True)
class Fleet:
    """The engines, all of one model."""

    urls: tuple[str, ...]
    description: str
    owned: Engines | None = None

    @property
    def pages(self) -> dict[str, str]:
        return {f"engine-{number}": f"{url}/metrics" for number, url in enumerate(self.urls, 1)}

    def settle(self) -> None:
        """Returns when nothing runs; caches of own engines are emptied, for others' there is the salt."""
        if self.owned is not None:
            asyncio.run(self.owned.make_cold())
            return
        deadline = time.monotonic() + _IDLE_SECONDS
        while any(_busy(url) for url in self.pages.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


@contextmanager
def fleet(options: CompareOptions, logs: Path) -> Iterator[Fleet]:
    """Starts engines, or takes those that run."""
    if options.backends is not None:
        urls = options.backend_urls
        yield Fleet(urls, f"{len(urls)} x vLLM that was running")
        return
    wanted = options.engine_options
    with running_engines(wanted, logs) as engines:
        kind = "real vLLM on the CPU" if wanted.kind is Kind.VLLM else "simulated engine"
        sizes = f"{wanted.kv_tokens:,} KV tokens and at most {wanted.max_num_seqs} sequences each"
        yield Fleet(tuple(engines.urls), f"{wanted.count} x {kind}, {sizes}", engines)


def _busy(page: str) -> bool:
    try:
        values = page_values(get(page, _PAGE_SECONDS).decode("utf-8", "replace"))
    except OSError:
        return False
    return values.get("running", 0.0) + values.get("waiting", 0.0) > 0
