"""`loadtest sim`: a simulated engine as a process of its own."""

import asyncio
import signal
from typing import Annotated

import typer
import uvloop

from loadtest.engine.config import EngineConfig, KvEventsConfig
from loadtest.engine.kv_events import Encoding, HashFormat
from loadtest.engine.scheduler import PRESETS, Limits, Preset
from loadtest.engine.server import SimulatedEngine


def sim(
    port: Annotated[int, typer.Option(help="Port to listen at; 0 chooses one and prints it.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "sim",
    lora: Annotated[list[str] | None, typer.Option(help="Name of an adapter; may be repeated.")] = None,
    preset: Annotated[Preset, typer.Option(help="How fast the engine is.")] = Preset.H100_8B,
    time_scale: Annotated[float, typer.Option(min=0, help="Multiplies all engine times; 0 is as fast as it can.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 8192,
    kv_tokens: Annotated[int, typer.Option(min=1, help="Size of the KV cache in tokens.")] = 432_000,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    max_model_len: Annotated[int, typer.Option(min=1, help="Longest sequence.")] = 131_072,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="Engines behind the server, each of that size.")] = 1,
    max_num_queued_reqs: Annotated[int | None, typer.Option(help="Refuse (503) beyond so many requests.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Demand this key under /v1.")] = None,
    embedding: Annotated[bool, typer.Option("--embedding", help="Serve an embedding model.")] = False,
    api_request_seconds: Annotated[
        float, typer.Option(min=0, help="CPU to spend on each pooling request, besides what it costs anyway.")
    ] = 0,
    api_input_seconds: Annotated[float, typer.Option(min=0, help="CPU to spend on each of its inputs.")] = 0,
    control: Annotated[bool, typer.Option("--control", help="Offer /sim/* and obey x-sim-script.")] = False,
    dev_mode: Annotated[bool, typer.Option("--dev-mode", help="Offer the routes clients must not reach.")] = False,
    responses_store: Annotated[bool, typer.Option("--responses-store", help="Keep responses for GET.")] = False,
    shutdown_timeout: Annotated[float, typer.Option(min=0, help="Seconds to drain on SIGTERM; 0 aborts.")] = 0,
    kv_events_endpoint: Annotated[str | None, typer.Option(help="Publish KV events here: tcp://*:5557.")] = None,
    kv_events_replay_endpoint: Annotated[str | None, typer.Option(help="Replay them here: tcp://*:5657.")] = None,
    kv_events_topic: Annotated[str, typer.Option(help="Their topic.")] = "",
    kv_events_buffer_steps: Annotated[int, typer.Option(min=0, help="Batches kept for replay.")] = 10_000,
    kv_events_encoding: Annotated[
        Encoding, typer.Option(help="Fields by name, or by position as in older vLLM.")
    ] = Encoding.MAP,
    kv_events_hashes: Annotated[
        HashFormat, typer.Option(help="Block hashes: their low 64 bits, or whole.")
    ] = HashFormat.INT,
) -> None:
    """Serve one simulated vLLM: real answers, errors and metrics, made-up text, no GPU. Ctrl-C stops it."""
    kv_events = None
    if kv_events_endpoint is not None:
        kv_events = KvEventsConfig(
            kv_events_endpoint, kv_events_replay_endpoint, kv_events_buffer_steps,
            topic=kv_events_topic, encoding=kv_events_encoding, hashes=kv_events_hashes,
        )  # fmt: skip
    try:
        limits = Limits(max_num_seqs, max_num_batched_tokens, block_size, max(1, kv_tokens // block_size))
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    config = EngineConfig(
        model=model, host=host, port=port, limits=limits, step_time=PRESETS[preset.value], time_scale=time_scale,
        max_model_len=min(max_model_len, limits.num_blocks * block_size), lora_adapters=tuple(lora or ()),
        api_key=api_key, embedding=embedding, api_request_seconds=api_request_seconds,
        api_input_seconds=api_input_seconds, control=control, dev_mode=dev_mode,
        max_num_queued_reqs=max_num_queued_reqs, responses_store=responses_store,
        shutdown_timeout_seconds=shutdown_timeout, data_parallel_size=data_parallel_size, kv_events=kv_events,
    )  # fmt: skip
    uvloop.run(_serve(config))


async def _serve(config: EngineConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with SimulatedEngine(config) as engine:
        typer.echo(f"simulated vLLM {config.version}: {engine.url} serves {config.model}")
        await stop.wait()
