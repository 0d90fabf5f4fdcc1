"""`python -m tests.bench predict`: its options, and the run: engines, gateway, load, then `loadtest predict`."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from loadtest.servers.engines import EngineOptions, Engines, Kind, running_engines
from loadtest.servers.server import Server, ServerFailed, gateway_server
from tests.bench.alone import alone, fail, say
from tests.bench.place import Place
from tests.bench.predict.load import Load, LoadFailed, drive, usual
from tests.bench.routing.arms import ours

_STEP_TOKENS = 2048  # of the simulated engines, and what vLLM takes on a CPU
_POLICY = "prefix"


def predict(
    engine: Annotated[Kind, typer.Option(help="Real vLLM on the CPU, or simulated.")] = Kind.SIM,
    engines: Annotated[int, typer.Option(min=1, help="How many.")] = 2,
    model: Annotated[Path, typer.Option(help="Model folder (vllm).")] = Path(".models/smollm2"),
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that each engine runs at once.")] = 32,
    rate: Annotated[float | None, typer.Option(help="Sessions per second.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Of the load that is predicted.")] = None,
    fitted: Annotated[
        bool, typer.Option("--fitted", help="Fit the step time of simulated engines, too, as if it were unknown.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of logs, results, trace and prediction.")] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where results are kept.")] = Path(".bench"),
) -> None:
    """Drive engines through the gateway, record its access log, replay it, and tell how near the replay was."""
    load = usual(engine)
    load = replace(load, sessions_per_second=rate or load.sessions_per_second, seconds=seconds or load.seconds)
    options = EngineOptions(engine, engines, model, kv_tokens=load.kv_tokens, max_num_seqs=max_num_seqs)
    place = Place(directory.resolve())
    folder = out.resolve() if out is not None else place.root / "predict"
    try:
        with alone(place):
            log, results = _measure(options, load, folder)
    except (ServerFailed, LoadFailed) as error:
        fail(str(error))
    sizes = {
        "engines": engines,
        "kv-tokens": options.kv_tokens,
        "max-num-seqs": max_num_seqs,
        "max-num-batched-tokens": _STEP_TOKENS,
        "block-size": options.block_tokens,
    }
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    if engine is Kind.SIM and not fitted:
        flags += ["--preset", "cpu-tiny"]
    command = [sys.executable, "-m", "loadtest", "predict", str(log), "--measured", str(results), "--out", str(folder)]
    raise typer.Exit(subprocess.run([*command, *flags], check=False).returncode)


def _measure(options: EngineOptions, load: Load, folder: Path) -> tuple[Path, Path]:
    """The gateway's access log, and what the client measured."""
    folder.mkdir(parents=True, exist_ok=True)
    say(f"starting {options.count} engines")
    with running_engines(options, folder / "logs") as engines, _gateway(engines, folder) as gateway:
        results = drive(gateway.url, engines.urls, load, folder, say)
    return folder / "gateway.out", results


def _gateway(engines: Engines, folder: Path) -> Server:
    """Its access log, beside its errors, is whole once it has been stopped."""
    sections = ours(_POLICY).sections(engines.urls, engines.options)
    sections["server"] |= {"access_log_prefixes": True}
    return gateway_server(sections, folder / "gateway.log", apart=True)
