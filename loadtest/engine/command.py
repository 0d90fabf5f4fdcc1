"""`loadtest sim`: a simulated engine as a process of its own."""

import asyncio
import signal
from enum import StrEnum
from typing import Any

import typer

from loadtest.engine.config import EngineConfig
from loadtest.engine.scheduler import Limits
from loadtest.engine.server import SimulatedEngine
from loadtest.engine.step_time import PRESETS


class Preset(StrEnum):
    """How fast the simulated engine is."""

    H100_8B = "h100-8b"
    CPU_TINY = "cpu-tiny"


def run_simulated_engine(
    *,
    preset: Preset,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_tokens: int,
    block_size: int,
    max_model_len: int,
    **fields: Any,
) -> None:
    """Serve until SIGTERM or SIGINT."""
    import uvloop

    try:
        limits = Limits(max_num_seqs, max_num_batched_tokens, block_size, max(1, kv_tokens // block_size))
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    config = EngineConfig(
        limits=limits,
        step_time=PRESETS[preset.value],
        max_model_len=min(max_model_len, limits.num_blocks * block_size),
        **fields,
    )
    uvloop.run(_serve(config))


async def _serve(config: EngineConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with SimulatedEngine(config) as engine:
        typer.echo(f"simulated vLLM {config.version}: {engine.url} serves {config.model}")
        await stop.wait()
