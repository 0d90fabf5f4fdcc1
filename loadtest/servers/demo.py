"""`gateway demo`: engines and a gateway, and a first request to try. All that was started ends with the command.

The gateway's command runs this as a process: the gateway itself knows nothing of the load tests.
"""

import json
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Annotated, Literal

import typer

from loadtest.servers.processes import Guard, free_ports, launch, stop
from loadtest.servers.server import Server, ServerFailed, get, serves, simulated_engine, wait_until
from loadtest.vllm_cpu.process import DEFAULT_VENV, VllmOptions, VllmProcess

HOST = "127.0.0.1"
PORT = 8080
PORTS_TRIED = 100
LAST_PORT = 65535
PORT_OPTION = "--port N, or make demo ARGS='--port N'"
MODEL_NAME = "demo-model"
MAX_NUM_SEQS = 32
DEFAULT_MODEL_DIR = Path(".models/smollm2")
POLL_SECONDS = 0.1
READY_SECONDS = 30.0
STOP_SECONDS = 10.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]
EngineKind = Literal["sim", "vllm"]


class DemoFailed(Exception):
    """The demonstration cannot continue; the message gives the reason."""


def choose_ports(wanted: int | None, say: Say, first: int = PORT) -> tuple[int, int]:
    """The gateway's port and its admin port. If none is wanted, the first free pair. Raises DemoFailed."""
    if wanted is None:
        pairs = ((port, port + 1) for port in range(first, first + 2 * PORTS_TRIED, 2))
        pair = next((pair for pair in pairs if not any(map(_why_taken, pair))), None)
        if pair is None:
            raise DemoFailed(f"no two adjacent free ports from {first} on: choose a port with {PORT_OPTION}")
        if pair[0] != first:
            say(f"port {first} or {first + 1} is in use: using {pair[0]} and {pair[1]} (to choose: {PORT_OPTION})")
        return pair
    if why := _why_taken(wanted):
        raise DemoFailed(f"port {wanted} is unavailable: {why}: choose another with {PORT_OPTION}")
    if wanted < LAST_PORT and not _why_taken(wanted + 1):
        return wanted, wanted + 1
    admin = next(port for port in free_ports(2) if port != wanted)
    say(f"port {wanted + 1} is unavailable for admin: using {admin}")
    return wanted, admin


def _why_taken(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def make_engines(
    count: int, kind: EngineKind, model: Path | None, logs: Path, say: Say
) -> tuple[Sequence[Server], str]:
    """Engines that are not started yet, and the model they will serve. Raises DemoFailed."""
    named_ports = [(port, logs / f"engine-{number}.log") for number, port in enumerate(free_ports(count), 1)]
    if kind == "sim":
        if model is not None:
            raise DemoFailed("--model requires --engine vllm: simulated engines have no model")
        flags = ["--host", HOST, "--model", MODEL_NAME, "--max-num-seqs", str(MAX_NUM_SEQS)]
        return [simulated_engine(flags, log, port) for port, log in named_ports], MODEL_NAME
    folder = model or DEFAULT_MODEL_DIR
    for needed in (DEFAULT_VENV / "bin/python", folder / "config.json"):
        if not needed.exists():
            raise DemoFailed(f"{needed} is missing: `make demo ENGINE=vllm` installs vLLM and a model first")
    engines = [
        VllmProcess(VllmOptions(folder, port=port, max_num_seqs=MAX_NUM_SEQS), log, say) for port, log in named_ports
    ]
    return engines, folder.name


def gateway_config(urls: Sequence[str], port: int, admin_port: int, batches: Path) -> dict[str, object]:
    """The gateway's configuration: reachable from this machine alone, quick to stop. `batches`: a folder for them."""
    server = {
        "host": HOST,
        "port": port,
        "admin": {"host": HOST, "port": admin_port},
        "drain_delay_seconds": 0,
        "drain_timeout_seconds": 2,
    }
    backends = [
        {"url": url, "name": f"engine-{number}", "max_in_flight": MAX_NUM_SEQS} for number, url in enumerate(urls, 1)
    ]
    return {"server": server, "backends": backends, "batches": {"path": str(batches)}}


def first_steps(port: int, admin_port: int, model: str, python: str, kind: EngineKind = "sim") -> str:
    answers = "\nThe engines are simulated: their answers are random words.\n" if kind == "sim" else ""
    url = f"http://{HOST}:{port}"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32})
    return f"""
The gateway serves {model} at {url}. Try, in another terminal:

curl -i {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}

{shlex.quote(python)} - <<'PY'
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="unused")
messages = [{{"role": "user", "content": "Count to ten."}}]
for chunk in client.chat.completions.create(model="{model}", messages=messages, max_tokens=64, stream=True):
    print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
print()
PY
{answers}
dashboard  http://{HOST}:{admin_port}/
metrics    http://{HOST}:{admin_port}/metrics
backends   http://{HOST}:{admin_port}/admin/backends

Ctrl-C stops all of them.
"""


def all_up(backends: bytes) -> bool:
    listed = json.loads(backends)["backends"]
    return bool(listed) and all(backend["state"] == "up" and backend["models"] for backend in listed)


def run(count: int, wanted_port: int | None, kind: EngineKind, model: Path | None, say: Say) -> None:
    """Start everything, say how to try it, and stay until Ctrl-C or SIGTERM. Raises DemoFailed."""
    port, admin_port = choose_ports(wanted_port, say)
    try:
        with _stoppable(), ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-demo-")))
            engines, name = make_engines(count, kind, model, logs=folder, say=say)
            stack.callback(_stop_all, engines, say)
            for engine in engines:
                say(f"starting a {'simulated' if kind == 'sim' else 'CPU'} vLLM at {engine.url}")
                engine.start()
            for engine in engines:
                engine.wait_ready()
            config = folder / "gateway.yaml"
            urls = [engine.url for engine in engines]
            config.write_text(json.dumps(gateway_config(urls, port, admin_port, folder / "batches")))
            say(f"starting the gateway at http://{HOST}:{port}")
            gateway = launch([sys.executable, "-m", "gateway", "serve", "-c", str(config)], None, None, None)
            stack.callback(stop, gateway, STOP_SECONDS)
            stack.callback(Guard(gateway.pid).dismiss)
            _wait_until_up(gateway, port, admin_port)
            say(first_steps(port, admin_port, name, python=sys.executable, kind=kind))
            _stay(lambda: gateway.poll() is None or serves(f"http://{HOST}:{port}/livez"), engines, say)
    except ServerFailed as failed:
        raise DemoFailed(str(failed)) from None
    except KeyboardInterrupt:
        say("stopped")


def _wait_until_up(gateway: Popen[bytes], port: int, admin_port: int) -> None:
    backends = f"http://{HOST}:{admin_port}/admin/backends"
    try:
        wait_until(lambda: serves(f"http://{HOST}:{port}/readyz"), gateway.poll, READY_SECONDS)
        wait_until(lambda: all_up(get(backends)), gateway.poll, READY_SECONDS)
    except ServerFailed as failed:
        raise DemoFailed(f"the gateway {failed}") from None


def _stay(gateway_runs: Callable[[], bool], engines: Sequence[Server], say: Say) -> None:
    """Wait until the gateway has ended, which another process may have replaced (`gateway restart`), or all engines."""
    running = list(engines)
    while running:
        if not gateway_runs():
            raise DemoFailed("the gateway exited")
        for engine in [engine for engine in running if not engine.is_running()]:
            running.remove(engine)
            say(f"the engine at {engine.url} has exited; {len(running)} left")
        time.sleep(POLL_SECONDS)
    raise DemoFailed("all engines have exited")


def _stop_all(engines: Sequence[Server], say: Say) -> None:
    say("stopping")
    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(lambda engine: engine.stop(), engines))


@contextmanager
def _stoppable() -> Iterator[None]:
    """Any of these signals ends the block as Ctrl-C does, and none interrupts the clean-up that follows."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    backends: Annotated[int, typer.Option(min=1, max=16, help="Number of engines.")] = 2,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=LAST_PORT,
            help="Port of the gateway; the admin port is the next one.",
            show_default="8080, or the next free pair",
        ),
    ] = None,
    engine: Annotated[EngineKind, typer.Option(help="Simulated engines, or real vLLM on the CPU.")] = "sim",
    model: Annotated[Path | None, typer.Option(help="Model folder for real engines (--engine vllm).")] = None,
) -> None:
    """Start engines and a gateway, and print an example request. Ctrl-C stops all of them."""
    try:
        run(backends, port, engine, model=model, say=typer.echo)
    except DemoFailed as error:
        for line in str(error).splitlines():
            typer.echo(f"gateway: {line}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app(prog_name="gateway demo")
