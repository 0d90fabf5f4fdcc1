"""Compare what proxies cost on one core.

`python -m tests.bench run` builds the tools, installs the peers that are missing, compares, and prints the table.
`smoke` is a short run of ours, and of nginx if it is there, that fails on any error.
`overload` asks ours for up to ten times what the engines can serve; it fails if a goal is missed.
`deciding` times the gateway's decisions alone; they are part of `run`, too, and so is a short run of `embeddings`.
`fairness` shows what one client waits for while another floods the gateway.
`limits` compares the adaptive limit on sequences in flight with every static one, in virtual time.
`routing` compares what routers make of prefix caches, on real engines under a trace.
`bounds` sends every hostile input, and shows what it costs others and the gateway's memory.
`soak` sends a million mixed requests, and fails if anything is left of them or memory grows.
`replicas` compares several gateways before one fleet with a single one.
`restarts` restarts the gateway again and again under load; it fails if a client notices.
`documents` shows how much sooner a long rerank request is answered by two engines than by one.
`predict` drives engines through the gateway, replays the gateway's log, and tells how near the replay was.
`bodies-stall` shows how long the worst bodies within the limits stop the event loop.
`embeddings` compares many small embeddings requests with and without the gateway's batches.
`tracing` shows what OpenTelemetry traces cost a request.
`watched` shows what an open dashboard costs a gateway.
`instructions` counts what the gateway's own code runs per request, event and decision, and keeps to a budget.

The proxy has one core to itself. On another core a mock of two vLLM servers answers and a closed-loop load generator
asks; both are in C and cost less than any proxy. Ours is built for a Python with PGO and LTO. Every repetition runs
every proxy once, in turn, so that a drift of the machine hits all alike: quote medians and ratios of one run. CPU is
that of the proxy's whole process tree, over the same window in which requests and events are counted. A proxy that
cannot be installed is left out with a word.
"""

import os
import resource
from pathlib import Path
from typing import Annotated

import typer

from gateway.config import ServerConfig
from loadtest.compare.peers import OURS, NotInstalled, named, version
from loadtest.compare.proxy import Peer
from loadtest.servers.engines import Kind
from tests.bench import bodies_stall, fairness, measure, peers, report, scenarios, tracing, watched
from tests.bench.alone import alone, fail, say
from tests.bench.bounds.command import bounds
from tests.bench.build import Interpreter, interpreter, quotable
from tests.bench.deciding import measure as decisions
from tests.bench.deciding.results import table
from tests.bench.documents import documents
from tests.bench.embeddings.command import embeddings
from tests.bench.embeddings.run import Options as EmbeddingOptions
from tests.bench.embeddings.run import compare as compare_embeddings
from tests.bench.install import install
from tests.bench.instructions.command import instructions
from tests.bench.limits import compare, crowds
from tests.bench.machine import describe
from tests.bench.offline import compare as offline
from tests.bench.offline import cost as offline_cost
from tests.bench.offline import day as offline_day
from tests.bench.offline import live as offline_live
from tests.bench.overload import report as overload
from tests.bench.overload.load import MULTIPLES, scenario
from tests.bench.place import SOURCES, Cores, Place, choose_cores, hardware_siblings
from tests.bench.predict.command import predict
from tests.bench.replicas import replicas
from tests.bench.restarts.command import SMOKE as SMOKE_RESTARTS
from tests.bench.restarts.command import restarts
from tests.bench.restarts.command import show as show_restarts
from tests.bench.results import Results, Turn
from tests.bench.routing.command import routing
from tests.bench.scenarios import Scenario
from tests.bench.soak.command import soak

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_ROOT = Path(".bench")
_OPEN_FILES = 65536
OVERLOAD = SOURCES / "overload" / "gateway.yaml"
Names = Annotated[list[str] | None, typer.Argument(help=f"Proxies: {', '.join(peers.PEERS)}. None = all.")]
Directory = Annotated[Path, typer.Option("--dir", help="Where tools, peers and results are kept.")]


@app.command("install")
def install_command(names: Names = None, directory: Directory = _ROOT) -> None:
    """Build the tools and install peers, each into an environment of its own."""
    _prepare(Place(directory.resolve()), names or [])


@app.command()
def run(
    names: Names = None,
    repetitions: Annotated[int, typer.Option("--reps", min=1, help="Runs of every proxy.")] = 5,
    tests: Annotated[
        str, typer.Option(help="; ".join(f"{s.name}: {s.title}" for s in scenarios.ALL))
    ] = scenarios.DEFAULT,
    out: Annotated[Path | None, typer.Option(help="results.json; the table goes beside it as .md.")] = None,
    python: Annotated[str, typer.Option(help="Build ours for it. None: this one or the system's.")] = "",
    as_is: Annotated[bool, typer.Option("--as-is", help="Measure ours from this checkout, under this Python.")] = False,
    directory: Directory = _ROOT,
) -> None:
    """Compare proxies; print and keep the table and every figure behind it."""
    try:
        chosen = scenarios.named(tests)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    place = Place(directory.resolve())
    try:
        built_for = None if as_is else interpreter(python) if python else quotable()
    except NotInstalled as error:
        fail(str(error))
    ready = _prepare(place, names or [], built_for)
    ours = any(peer.name == OURS for peer in ready)
    embedded = compare_embeddings(_embedding_options(place), say) if ours else []  # first, while all cores are free
    measured = _compare(place, ready, chosen, repetitions, built_for)
    results = measured.model_copy(update={"timings": decisions.measure(), "embeddings": embedded})
    path = out or place.root / "results.json"
    path.write_text(results.model_dump_json(indent=1) + "\n")
    shown = report.markdown(results)
    path.with_suffix(".md").write_text(shown)
    typer.echo(f"\n{shown}\nKept in {path} and {path.with_suffix('.md')}")
    if not any(turn.samples for turns in results.turns.values() for turn in turns):
        fail("no proxy could be measured")


@app.command("report")
def report_command(path: Path = _ROOT / "results.json") -> None:
    """Print the table of an earlier run."""
    if not path.exists():
        fail(f"there is no {path}: run the comparison first")
    typer.echo(report.markdown(Results.model_validate_json(path.read_text())))


@app.command()
def smoke(names: Names = None, directory: Directory = _ROOT) -> None:
    """Half a minute of ours, and of nginx if it is there, then two restarts under load; exit 1 on any error."""
    place = Place(directory.resolve())
    wanted = named(names or [OURS, "nginx"], peers.PEERS)
    present = [peer for peer in wanted if peer.name == OURS or peer.find(place.peers)]
    ready = _prepare(place, [peer.name for peer in present])
    results = _compare(place, ready, scenarios.SMOKE, repetitions=1)
    typer.echo(report.markdown(results))
    if found := report.problems(results, present):
        fail("\n".join(found))
    show_restarts(SMOKE_RESTARTS)
    typer.echo("smoke: every request was answered well")


@app.command()
def deciding(runs: Annotated[int, typer.Option(min=1, help="Of each timing.")] = decisions.RUNS) -> None:
    """Time the gateway's decisions alone: placing a request, looking through the line, keys of a long prompt."""
    typer.echo(table(decisions.measure(runs)))


@app.command("bodies-stall")
def bodies_stall_command(
    mebibytes: Annotated[float, typer.Option(help="server.max_body_bytes; 0 = the default.")] = 0,
    named: Annotated[str, typer.Option(help="Only bodies whose name contains this.")] = "",
) -> None:
    """Time the steps in which the worst bodies within the limits are read; exit 1 if one takes over 50 ms."""
    limits = ServerConfig(max_body_bytes=int(mebibytes * 1048576)) if mebibytes else ServerConfig()
    typer.echo(bodies_stall.HEAD)
    longest_ms = 0.0
    for timing in bodies_stall.measure(limits, named):
        typer.echo(timing.row())
        longest_ms = max(longest_ms, timing.longest_ms)
    typer.echo(f"\nlongest step: {longest_ms:.1f} ms")
    if longest_ms > bodies_stall.LIMIT_MS:
        fail(f"a step takes over {bodies_stall.LIMIT_MS:g} ms")


@app.command("fairness")
def fairness_command(seconds: Annotated[float, typer.Option(min=10, help="Of each of the three arms.")] = 60.0) -> None:
    """Show what a client that asks once a second waits for: alone, beside a flood, and in one line with it."""
    typer.echo(fairness.HEAD)
    for arm in fairness.measure(seconds):
        typer.echo(arm.row())


@app.command("limits")
def limits_command(
    seconds: Annotated[float, typer.Option(min=10, help="Virtual time of a run, after 200 s of warm-up.")] = 400.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every limit.")] = 2,
    crowd: Annotated[str, typer.Option(help="Only the crowd of this name.")] = "",
) -> None:
    """Compare the adaptive limit with every static one, on modelled engines that more want to use than fit."""
    chosen = [each for each in crowds.ALL if crowd in ("", each.name)]
    if not chosen:
        raise typer.BadParameter(f"there are {', '.join(each.name for each in crowds.ALL)}", param_hint="--crowd")
    typer.echo(compare.table((each, compare.compared(each, seconds, seeds)) for each in chosen))


@app.command("offline")
def offline_command(
    seconds: Annotated[float, typer.Option(min=60, help="Of a run: bursts come once a minute.")] = 240.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with other arrivals, which count together.")] = 3,
    live: Annotated[bool, typer.Option("--live", help="Real time and sockets, by the API; needs idle cores.")] = False,
    engine: Annotated[Kind, typer.Option(help="Of --live: two of real vLLM on the CPU, or four simulated.")] = Kind.SIM,
    picture: Annotated[Path | None, typer.Option(help="Draw a day instead, as SVG; takes 3 min.")] = None,
    cost: Annotated[bool, typer.Option("--cost", help="Instead, the gateway's CPU time of a line.")] = False,
) -> None:
    """Compare ways to run an endless offline batch beside bursts of interactive requests, on modelled engines."""
    if picture is not None:
        picture.write_text(offline_day.drawn(), encoding="utf-8")
    elif cost:
        typer.echo(offline_cost.table())
    elif live:
        fleet = offline_live.REAL if engine is Kind.VLLM else offline_live.SIMULATED
        typer.echo(offline.table(*offline_live.compared(fleet, seconds)))
    else:
        typer.echo(offline.table(*offline.compared(seconds, range(1, 1 + seeds))))


@app.command("overload")
def overload_command(
    body: Annotated[str, typer.Option(help="Size of the requests: 1k, 16k, ...")] = "1k",
    seconds: Annotated[float, typer.Option(min=1, help="Of each load.")] = 5.0,
    directory: Directory = _ROOT,
) -> None:
    """Refusals under up to ten times the capacity: what they cost, and what is served meanwhile."""
    place = Place(directory.resolve())
    _prepare(place, [OURS])
    cores = _take_cores()
    chosen = {multiple: scenario(multiple, body, seconds) for multiple in MULTIPLES}
    try:
        with alone(place), measure.engines(place, cores) as bench:
            turn = measure.measure_turn(bench, peers.ours_with(OVERLOAD), list(chosen.values()))
    except measure.MeasurementFailed as error:
        fail(str(error))
    if turn.failure:
        fail(turn.failure)
    samples = {multiple: turn.samples[each.name] for multiple, each in chosen.items()}
    typer.echo(overload.markdown(samples))
    if found := overload.problems(samples):
        fail("\n".join(found))


@app.command("tracing")
def tracing_command(
    repetitions: Annotated[int, typer.Option("--reps", min=1, help="Rounds of all arms.")] = 5,
    ratios: Annotated[list[float] | None, typer.Option("--ratio", help="Shares of sampled requests.")] = None,
    directory: Directory = _ROOT,
) -> None:
    """Show what traces cost: this checkout without them, with none sampled, and with 1 % sampled and sent."""
    place = Place(directory.resolve())
    _prepare(place, [OURS])
    cores = _take_cores()
    try:
        with alone(place):
            typer.echo(tracing.table(tracing.compared(place, cores, ratios or [0.0, 0.01], repetitions)))
    except measure.MeasurementFailed as error:
        fail(str(error))


@app.command("watched")
def watched_command(
    engines: Annotated[list[int] | None, typer.Option("--engines", help="Sizes of the fleet.")] = None,
    rate: Annotated[float, typer.Option(min=0, help="Requests a second.")] = 50,
    seconds: Annotated[float, typer.Option(min=1, help="Of each turn.")] = 15,
    repetitions: Annotated[int, typer.Option("--reps", min=1, help="Turns without a page, and with one.")] = 3,
) -> None:
    """Show what an open dashboard costs: CPU of a gateway without one and with one, in turns."""
    typer.echo(watched.table([watched.watched(each, rate, seconds, repetitions) for each in engines or [4, 64]]))


app.command("bounds")(bounds)
app.command("soak")(soak)
app.command("replicas")(replicas)
app.command("restarts")(restarts)
app.command("instructions")(instructions)
app.command("routing")(routing)
app.command("predict")(predict)
app.command("documents")(documents)
app.command("embeddings")(embeddings)


def _prepare(place: Place, names: list[str], python: Interpreter | None = None) -> list[Peer]:
    installed = {} if python is None else {OURS: peers.ours_with(peers.CONFIG, installed=True)}
    try:
        return install(place, named(names, peers.PEERS | installed), say, python)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except NotInstalled as error:
        fail(str(error))


def _embedding_options(place: Place) -> EmbeddingOptions:
    return EmbeddingOptions("sim", Path("sim"), (1, 64), 4, "base64", 3.0, 3, place.root / "embeddings")


def _compare(
    place: Place, ready: list[Peer], chosen: list[Scenario], repetitions: int, python: Interpreter | None = None
) -> Results:
    cores = _take_cores()
    turns: dict[str, list[Turn]] = {peer.name: [] for peer in ready}
    line: list[Turn] = []
    is_whole = chosen != scenarios.SMOKE
    capped = peers.ours_with(peers.CONFIG, python is not None, BENCH_MAX_IN_FLIGHT=str(scenarios.SLOTS // 2))
    try:
        with alone(place), measure.engines(place, cores) as bench:
            for repetition in range(1, repetitions + 1):
                for peer in ready:
                    typer.echo(f"repetition {repetition} of {repetitions}: {peer.name}", err=True)
                    loads = [*chosen, scenarios.SCRAPED] if is_whole and peer.name == OURS else chosen
                    turns[peer.name].append(measure.measure_turn(bench, peer, loads))
                if OURS in turns and is_whole:
                    typer.echo(f"repetition {repetition} of {repetitions}: {OURS}, caps in force", err=True)
                    line.append(measure.measure_turn(bench, capped, [scenarios.FULL, scenarios.LINE]))
    except measure.MeasurementFailed as error:
        fail(str(error))
    return Results(
        machine=describe(python),
        versions={peer.name: version(place.peers, peer) for peer in ready},
        scenarios=[scenario.name for scenario in chosen],
        turns=turns,
        line=line,
    )


def _take_cores() -> Cores:
    """Choose cores, move this process off the proxy's, and allow children the connections that 500 streams need."""
    try:
        cores = choose_cores(os.sched_getaffinity(0), hardware_siblings)
    except ValueError as error:
        fail(str(error))
    os.sched_setaffinity(0, {cores.harness})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, _OPEN_FILES)), hard))
    return cores


if __name__ == "__main__":
    app()
