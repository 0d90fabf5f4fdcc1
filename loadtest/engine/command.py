"""`loadtest sim`: a simulated engine as a process of its own."""

import asyncio
import signal
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from pydantic import BaseModel, ConfigDict

from loadtest.engine.config import EngineConfig
from loadtest.engine.kv_events import Encoding, HashFormat, KvEventsConfig
from loadtest.engine.scheduler import Batching, Limits
from loadtest.engine.server import SimulatedEngine
from loadtest.engine.step_time import PRESETS, Preset, kv_tokens, parsed

_BATCHED_TOKENS = 8192


class SimOptions(BaseModel):
    """What the user asked for, as typed."""

    model_config = ConfigDict(frozen=True)

    port: Annotated[int, typer.Option(help="Port to listen at; 0 chooses one and prints it.")]
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1"
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "sim"
    lora: Annotated[list[str] | None, typer.Option(help="Name of an adapter; may be repeated.")] = None
    preset: Annotated[Preset, typer.Option(help="How fast the engine is.")] = Preset.H100_8B
    step_times: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Instead of the preset's: the prediction.json of `loadtest predict`."
        ),
    ] = None
    time_scale: Annotated[float, typer.Option(min=0, help="Multiplies all engine times; 0 is as fast as it can.")] = 1
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a step. Default: 8192, or without chunked prefill the longest prompt."),
    ] = None
    enable_chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Compute long prompts in several steps, beside the decoding of others.",
        ),
    ] = True
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse the KV cache of equal prompt prefixes."
        ),
    ] = True
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", min=1, help="GPUs over which the model is split.")
    ] = 1
    batching: Annotated[
        Batching, typer.Option(help="static: requests run in groups, and the next group waits until all have ended.")
    ] = Batching.CONTINUOUS
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Size of the KV cache in tokens. Default: that of the preset's GPUs.")
    ] = None
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16
    max_model_len: Annotated[int, typer.Option(min=1, help="Longest sequence.")] = 131_072
    data_parallel_size: Annotated[int, typer.Option(min=1, help="Engines behind the server, each of that size.")] = 1
    max_num_queued_reqs: Annotated[int | None, typer.Option(help="Refuse (503) beyond so many requests.")] = None
    api_key: Annotated[str | None, typer.Option(help="Demand this key under /v1.")] = None
    embedding: Annotated[bool, typer.Option("--embedding", help="Serve an embedding model.")] = False
    api_request_seconds: Annotated[
        float, typer.Option(min=0, help="CPU to spend on each pooling request, besides what it costs anyway.")
    ] = 0
    api_input_seconds: Annotated[float, typer.Option(min=0, help="CPU to spend on each of its inputs.")] = 0
    control: Annotated[bool, typer.Option("--control", help="Offer /sim/* and obey x-sim-script.")] = False
    dev_mode: Annotated[bool, typer.Option("--dev-mode", help="Offer the routes clients must not reach.")] = False
    responses_store: Annotated[bool, typer.Option("--responses-store", help="Keep responses for GET.")] = False
    shutdown_timeout: Annotated[float, typer.Option(min=0, help="Seconds to drain on SIGTERM; 0 aborts.")] = 0
    kv_events_endpoint: Annotated[str | None, typer.Option(help="Publish KV events here: tcp://*:5557.")] = None
    kv_events_replay_endpoint: Annotated[str | None, typer.Option(help="Replay them here: tcp://*:5657.")] = None
    kv_events_topic: Annotated[str, typer.Option(help="Their topic.")] = ""
    kv_events_buffer_steps: Annotated[int, typer.Option(min=0, help="Batches kept for replay.")] = 10_000
    kv_events_encoding: Annotated[Encoding, typer.Option(help="Fields by name, or by position as in older vLLM.")] = (
        Encoding.MAP
    )
    kv_events_hashes: Annotated[HashFormat, typer.Option(help="Block hashes: their low 64 bits, or whole.")] = (
        HashFormat.INT
    )

    @property
    def kv_events(self) -> KvEventsConfig | None:
        if self.kv_events_endpoint is None:
            return None
        return KvEventsConfig(
            endpoint=self.kv_events_endpoint,
            replay_endpoint=self.kv_events_replay_endpoint,
            buffer_steps=self.kv_events_buffer_steps,
            topic=self.kv_events_topic,
            encoding=self.kv_events_encoding,
            hashes=self.kv_events_hashes,
        )

    @property
    def engine(self) -> EngineConfig:
        """The settings of the engine. Raises ValueError, OSError."""
        gpus = self.tensor_parallel_size
        fitted = None if self.step_times is None else parsed(self.step_times.read_bytes())
        blocks = max(1, (self.kv_tokens or kv_tokens(self.preset.value, gpus)) // self.block_size)
        longest = min(self.max_model_len, blocks * self.block_size)
        batched = self.max_num_batched_tokens or max(_BATCHED_TOKENS, 0 if self.enable_chunked_prefill else longest)
        alike = {field.name for field in fields(EngineConfig)} & set(SimOptions.model_fields) - {"max_model_len"}
        return EngineConfig(
            **{name: getattr(self, name) for name in alike},
            limits=Limits(
                self.max_num_seqs,
                batched,
                block_size=self.block_size,
                num_blocks=blocks,
                prefix_caching=self.enable_prefix_caching,
                chunked_prefill=self.enable_chunked_prefill,
                batching=self.batching,
            ),
            step_time=fitted or PRESETS[self.preset.value].tensor_parallel(gpus),
            max_model_len=longest,
            lora_adapters=tuple(self.lora or ()),
            shutdown_timeout_seconds=self.shutdown_timeout,
            kv_events=self.kv_events,
        )


def sim(options: SimOptions) -> None:
    """Serve one simulated vLLM: real answers, errors and metrics, made-up text, no GPU. Ctrl-C stops it."""
    try:
        config = options.engine
    except (ValueError, OSError) as problem:
        raise typer.BadParameter(str(problem)) from None
    uvloop.run(_serve(config))


async def _serve(config: EngineConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with SimulatedEngine(config) as engine:
        typer.echo(f"simulated vLLM {config.version}: {engine.url} serves {config.model}")
        await stop.wait()
