"""`python -m tests.bench embeddings`: its options."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tests.bench.embeddings.picture import picture
from tests.bench.embeddings.run import Options, compare, table


def embeddings(
    engine: Annotated[str, typer.Option(help="vllm (real, on the CPU) or sim (as fast as on a GPU).")] = "vllm",
    model: Annotated[Path, typer.Option(help="Model folder.")] = Path(".models/minilm"),
    clients: Annotated[str, typer.Option(help="Clients at once, separated by commas.")] = "1,8,64",
    words: Annotated[int, typer.Option(min=1, help="Of each text.")] = 4,
    encoding: Annotated[
        str, typer.Option(help="What clients ask for: base64 (as OpenAI's SDK does) or float.")
    ] = "base64",
    seconds: Annotated[float, typer.Option(help="Of each measurement.")] = 5.0,
    repetitions: Annotated[int, typer.Option("--reps", min=1, help="Of every measurement.")] = 5,
    directory: Annotated[Path, typer.Option("--dir", help="Where logs and results are kept.")] = Path(
        ".bench/embeddings"
    ),
) -> None:
    """Clients that ask for one embedding each: directly, through the gateway, and with its batches."""
    options = Options(
        engine, model, tuple(map(int, clients.split(","))), words, encoding, seconds, repetitions, directory
    )
    samples = compare(options, lambda line: typer.echo(line, err=True))
    (directory / "results.json").write_text(json.dumps([asdict(sample) for sample in samples], indent=1) + "\n")
    (directory / "results.svg").write_text(picture(samples))
    (directory / "results.md").write_text(table(samples) + "\n")
    typer.echo(table(samples))
