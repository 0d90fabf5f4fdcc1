"""The command line of the load tests: `loadtest run`, `loadtest sim`, `loadtest replay`."""

from typing import Annotated

import typer

from loadtest.drive.command import run, with_options
from loadtest.engine.command import Preset, run_simulated_engine
from loadtest.replay.command import replay

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Drive load at anything that speaks OpenAI's API (`run`), stand in for a vLLM server (`sim`), or replay a"
    " recorded trace through routing policies (`replay`).",
    epilog="Such as: loadtest sim --port 8000, and in another terminal: loadtest run http://127.0.0.1:8000 -c 64 -d 30",
)


@app.command()
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
    max_num_queued_reqs: Annotated[int | None, typer.Option(help="Refuse (503) beyond so many requests.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Demand this key under /v1.")] = None,
    embedding: Annotated[bool, typer.Option("--embedding", help="Serve an embedding model.")] = False,
    control: Annotated[bool, typer.Option("--control", help="Offer /sim/* and obey x-sim-script.")] = False,
    dev_mode: Annotated[bool, typer.Option("--dev-mode", help="Offer the routes clients must not reach.")] = False,
    responses_store: Annotated[bool, typer.Option("--responses-store", help="Keep responses for GET.")] = False,
    shutdown_timeout: Annotated[float, typer.Option(min=0, help="Seconds to drain on SIGTERM; 0 aborts.")] = 0,
) -> None:
    """Serve one simulated vLLM: real answers, errors and metrics, made-up text, no GPU. Ctrl-C stops it."""
    run_simulated_engine(
        port=port,
        host=host,
        model=model,
        lora_adapters=tuple(lora or ()),
        preset=preset,
        time_scale=time_scale,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_tokens=kv_tokens,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_queued_reqs=max_num_queued_reqs,
        api_key=api_key,
        embedding=embedding,
        control=control,
        dev_mode=dev_mode,
        responses_store=responses_store,
        shutdown_timeout_seconds=shutdown_timeout,
    )


app.command("run")(with_options(run))
app.command("replay")(replay)


def main() -> None:
    """Entry point of the `loadtest` command."""
    app()


if __name__ == "__main__":
    main()
