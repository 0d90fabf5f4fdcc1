"""`python -m tests.bench routing`: its options."""

import random
from pathlib import Path
from typing import Annotated

import typer

from loadtest.servers.engines import EngineOptions, Kind
from loadtest.servers.server import ServerFailed
from loadtest.workloads.prompts import Endpoint
from loadtest.workloads.trace import TraceError
from tests.bench.alone import alone, fail, say
from tests.bench.place import Place
from tests.bench.routing import trace
from tests.bench.routing.arms import arms
from tests.bench.routing.made_trace import made_trace
from tests.bench.routing.measure import Fault
from tests.bench.routing.picture import picture
from tests.bench.routing.report import figures_of, markdown
from tests.bench.routing.results import RoutingResults
from tests.bench.routing.run import Order, carry_out
from tests.bench.routing.wording import WrongTokens

_NAMES = "gateway-prefix, gateway-least_loaded, gateway-round_robin, gateway-events, sglang-router, vllm-router, smg"


def routing(
    names: Annotated[list[str] | None, typer.Argument(help=f"Arms: {_NAMES}. None = all that are installed.")] = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="scaled16 trace (JSON lines). Default: one made to order.")
    ] = None,
    engine: Annotated[Kind, typer.Option(help="Real vLLM on the CPU, or simulated.")] = Kind.VLLM,
    engines: Annotated[int, typer.Option(min=2, help="How many.")] = 2,
    model: Annotated[Path, typer.Option(help="Model folder (vllm).")] = Path(".models/tiny"),
    kv_tokens: Annotated[int, typer.Option(min=4096, help="KV cache of each engine.")] = 65_536,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that each engine runs at once.")] = 32,
    kv_events: Annotated[bool, typer.Option("--kv-events", help="Engines publish KV events (vllm).")] = False,
    repetitions: Annotated[int, typer.Option("--reps", min=1, help="Runs of every arm.")] = 3,
    limit: Annotated[int, typer.Option(min=10, help="Requests of the trace.")] = 2000,
    skip: Annotated[int, typer.Option(min=0, help="Requests at the trace's start that are left out.")] = 0,
    load: Annotated[float, typer.Option(help="Share of what the engines can, measured at the start.")] = 0.7,
    rate: Annotated[float | None, typer.Option(help="Instead: multiple of the trace's own pace.")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="What is called.")] = Endpoint.COMPLETIONS,
    restart: Annotated[bool, typer.Option("--restart", help="Half of the engines restart at 40 %.")] = False,
    wipe: Annotated[
        bool, typer.Option("--wipe", help="Half of the caches are lost at 40 %, unannounced (vllm).")
    ] = False,
    slow: Annotated[float, typer.Option(min=1, help="The last engine is so many times slower (sim).")] = 1.0,
    flash_crowd: Annotated[bool, typer.Option("--flash-crowd", help="A crowd with one new prefix.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order of arms, and of the jitter.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of results.json, results.md, latency.svg.")] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where peers and results are kept.")] = Path(".bench"),
) -> None:
    """Compare what routers make of prefix caches: hit rate, TTFT, TPOT, throughput, on engines under a trace."""
    if restart and wipe:
        raise typer.BadParameter("give --restart or --wipe")
    if (slow != 1 and engine is not Kind.SIM) or ((wipe or kv_events) and engine is not Kind.VLLM):
        raise typer.BadParameter("--slow is for simulated engines, --wipe and --kv-events for real ones")
    options = EngineOptions(
        engine, engines, model, kv_tokens=kv_tokens, max_num_seqs=max_num_seqs, kv_events=kv_events, slow=slow
    )
    place = Place(directory.resolve())
    try:
        chosen, missing = arms(place, names or [], options)
        told = made_trace(2 * (skip + limit), seed) if trace_file is None else trace.read_trace(trace_file)
        rows = trace.slice_of(trace.spread(told, random.Random(seed)), skip, limit)
    except (ValueError, TraceError) as error:
        raise typer.BadParameter(str(error)) from error
    for name in missing:
        say(f"leaving out {name}: it is not installed (python -m tests.bench install {name})")
    order = Order(
        engines=options,
        arms=chosen,
        rows=rows,
        calibration_rows=told[skip:],
        trace=trace_file.name if trace_file else f"a made trace (seed {seed})",
        repetitions=repetitions,
        load=load,
        rate=rate,
        endpoint=endpoint,
        fault=Fault.RESTART if restart else Fault.WIPE if wipe else Fault.NONE,
        crowd=flash_crowd,
        seed=seed,
    )
    try:
        with alone(place):
            results = carry_out(order, place, say)
    except (ServerFailed, WrongTokens) as error:
        fail(str(error))
    _keep(results, out or place.root / "routing")


def _keep(results: RoutingResults, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(results.model_dump_json(indent=1) + "\n", encoding="utf-8")
    shown = markdown(results)
    (folder / "results.md").write_text(shown, encoding="utf-8")
    (folder / "latency.svg").write_text(picture(results), encoding="utf-8")
    typer.echo(f"\n{shown}\nKept in {folder}: results.json, results.md, latency.svg")
    if not any(figures_of(turns) for turns in results.turns.values()):
        raise typer.Exit(1)
