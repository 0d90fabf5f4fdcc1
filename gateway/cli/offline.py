"""A gateway in this process for one file of requests: started, used at a port of its own, and stopped."""

import asyncio
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from gateway.app import Gateway
from gateway.cli.batch_client import BatchClient, BatchFailed, BatchTask, take_results, watch
from gateway.config import Config
from gateway.config.file import load
from gateway.features.keys.settings import AuthConfig, KeyConfig

_KNOWN_SECONDS = 30.0
_LOOK_SECONDS = 0.05
_NO_LIMIT = 1 << 40
_MOST_LINES = 10_000_000


def offline_config(config: Config, folder: Path, api_key: str) -> Config:
    """The configuration for one file: a port and a key of its own, no limits of size, and no access log."""
    own = {"host": "127.0.0.1", "port": 0, "admin": None, "metrics": None, "tls": None, "access_log": False}
    limits = dict.fromkeys(("max_file_bytes", "max_bytes_per_key"), _NO_LIMIT)
    limits |= dict.fromkeys(("max_lines", "max_embedding_inputs", "max_enqueued_lines_per_key"), _MOST_LINES)
    changes: dict[str, Any] = {
        "server": config.server.model_copy(update=own),
        "batches": config.batches.model_copy(
            update={"path": str(folder), "database": None, "idle_only": False, **limits}
        ),
        "auth": AuthConfig(
            keys=(KeyConfig(name="offline", key=api_key),), cache_salt_secret=config.auth.cache_salt_secret
        ),
    }
    return config.model_copy(update=changes)


async def run_offline(task: BatchTask, file: Path | None, backends: Sequence[str]) -> bool:
    """Run the task without a running gateway. True = every request was answered. Raises ConfigError or BatchFailed."""
    config = load(file, backends)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("error"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    with tempfile.TemporaryDirectory(prefix=".gateway-batch-", dir=task.output.absolute().parent) as folder:
        api_key = secrets.token_urlsafe(32)
        own = offline_config(config, Path(folder), api_key)
        async with _running(own) as url, BatchClient.connected(url, api_key) as client:
            return await _run(client, task)


async def _run(client: BatchClient, task: BatchTask) -> bool:
    batch_id, console = await client.submit(task), Console(stderr=True)
    try:
        batch = await watch(client, batch_id, console)
    except asyncio.CancelledError:  # Ctrl-C; a second one ends the process
        console.print("cancelling: requests in flight end first")
        await client.cancel(batch_id)
        await take_results(client, await watch(client, batch_id, console), task)
        raise
    return await take_results(client, batch, task)


@asynccontextmanager
async def _running(config: Config) -> AsyncIterator[str]:
    """The URL of a gateway that has probed its backends. Raises BatchFailed if none can serve."""
    gateway = Gateway(config, None)
    async with gateway.running():
        fleet, loop = gateway.core.fleet, asyncio.get_running_loop()
        until = loop.time() + _KNOWN_SECONDS
        while loop.time() < until:
            known = [each for each in fleet.backends if each.health.state != "unknown"]
            if fleet.ready and len(known) == len(fleet.backends):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if not fleet.ready:
            raise BatchFailed(f"no backend is ready: {fleet.why_none('') or 'none was found'}")
        yield f"http://127.0.0.1:{gateway.server.port}"
