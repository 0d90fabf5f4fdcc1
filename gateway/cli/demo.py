"""`gateway demo`: engines and a gateway, and a first request to try. All that was started ends with the command.

Engines are processes of the package `loadtest`, which this one does not import.
"""

import importlib.util
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from types import FrameType
from typing import Literal

from gateway.cli.http_get import FAILURES, get

HOST = "127.0.0.1"
PORT = 8080
PORTS_TRIED = 100
LAST_PORT = 65535
CHOSEN_PORTS = range(20_000, 32_000)
PORT_OPTION = "--port N, or make demo ARGS='--port N'"
MODEL_NAME = "demo-model"
MAX_NUM_SEQS = 32
DEFAULT_MODEL_DIR = Path(".models/smollm2")
VLLM_DIR = Path(".venv-vllm")
POLL_SECONDS = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]
EngineKind = Literal["sim", "vllm"]


class DemoFailed(Exception):
    """The demonstration cannot continue; the message gives the reason."""


@dataclass(frozen=True)
class Patience:
    """How long a server may take to start and to stop, and how much of its log explains a failure."""

    ready_seconds: float = 30.0
    stop_seconds: float = 10.0
    log_lines: int = 10


PATIENCE = Patience()
# loadtest.vllm_cpu.serve gives the engine 180 s and 15 s, and reports more lines itself.
VLLM_PATIENCE = Patience(ready_seconds=200.0, stop_seconds=25.0, log_lines=40)


@dataclass
class ServerProcess:
    """A Python module that serves HTTP, as a process of its own.

    It writes errors to the log, and everything if it is quiet. Without a log path it writes where this command writes.
    """

    name: str
    url: str
    arguments: Sequence[str]
    ready_path: str
    log_path: Path | None
    patience: Patience = PATIENCE
    quiet: bool = True
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_path.open("wb") if self.log_path else nullcontext() as log:
            # A session of its own: Ctrl-C reaches this command alone, which then stops things in order.
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log if self.quiet else None,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Return when it answers 200. Raises DemoFailed when it ends before, or takes too long."""
        self.wait_until(lambda: read(self.url + self.ready_path) is not None, "is not ready")

    def wait_until(self, holds: Callable[[], bool], otherwise: str) -> None:
        """Return when something holds. Raises DemoFailed when the process ends before, or it takes too long."""
        seconds = self.patience.ready_seconds
        deadline = time.monotonic() + seconds
        while not holds():
            if not self.is_running():
                raise DemoFailed(f"{self.name} exited before it was ready{self._log_tail()}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} {otherwise} after {seconds:.0f} s{self._log_tail()}")
            time.sleep(POLL_SECONDS)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def terminate(self) -> None:
        if self.process is not None:
            self.process.terminate()

    def stop(self) -> None:
        """Return when it has ended; it is killed if it takes too long."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(self.patience.stop_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _log_tail(self) -> str:
        if self.log_path is None or not self.log_path.exists():
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()[-self.patience.log_lines :]
        return "\n".join(["; last lines of its log:", *lines]) if lines else ""


def read(url: str) -> bytes | None:
    """What a URL answers with 200 now; None if it does not."""
    try:
        status, body = get(url, 1.0)
    except FAILURES:
        return None
    return body if status == 200 else None


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


def free_ports(count: int) -> list[int]:
    """Distinct ports that were free a moment ago.

    Not of the range that outgoing connections use: such a port may be taken before a slow starter binds it.
    """
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            candidate = SystemRandom().choice(CHOSEN_PORTS)
            try:
                held.enter_context(socket.socket()).bind(("", candidate))
            except OSError:
                continue
            ports.append(candidate)
    return ports


def _why_taken(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def make_engines(count: int, kind: EngineKind, model: Path | None, logs: Path) -> tuple[list[ServerProcess], str]:
    """Engines that are not started yet, and the model they will serve. Raises DemoFailed."""
    if importlib.util.find_spec("loadtest") is None:
        raise DemoFailed(
            "the package loadtest, which runs the engines, is not installed: `pip install vllm-batching-gateway` brings"
            " it, or run `make demo` in a checkout of the project"
        )
    if kind == "sim" and model is not None:
        raise DemoFailed("--model requires --engine vllm: simulated engines have no model")
    folder = model or DEFAULT_MODEL_DIR
    for needed in (VLLM_DIR / "bin/python", folder / "config.json") if kind == "vllm" else ():
        if not needed.exists():
            raise DemoFailed(f"{needed} is missing: `make demo ENGINE=vllm` installs vLLM and a model first")
    engines = []
    for number, port in enumerate(free_ports(count), 1):
        name = f"engine-{number}"
        url, log = f"http://{HOST}:{port}", logs / f"{name}.log"
        options = ["--port", str(port), "--max-num-seqs", str(MAX_NUM_SEQS)]
        if kind == "sim":
            arguments = ["loadtest", "sim", "--host", HOST, "--model", MODEL_NAME, *options]
            engines.append(ServerProcess(name, url, arguments, "/health", log))
        else:
            arguments = ["loadtest.vllm_cpu.serve", "--model", str(folder), "--venv", str(VLLM_DIR), "--log", str(log)]
            errors = logs / f"{name}-errors.log"
            engines.append(
                ServerProcess(name, url, [*arguments, *options], "/health", errors, VLLM_PATIENCE, quiet=False)
            )
    return engines, MODEL_NAME if kind == "sim" else folder.name


def gateway_config(urls: Sequence[str], port: int, admin_port: int) -> dict[str, object]:
    """The gateway's configuration: reachable from this machine alone, quick to stop."""
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
    return {"server": server, "backends": backends}


def first_steps(port: int, admin_port: int, model: str, python: str) -> str:
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

metrics   http://{HOST}:{admin_port}/metrics
backends  http://{HOST}:{admin_port}/admin/backends

Ctrl-C stops all of them.
"""


def all_up(backends: bytes | None) -> bool:
    listed = json.loads(backends)["backends"] if backends else []
    return bool(listed) and all(backend["state"] == "up" and backend["models"] for backend in listed)


def run(count: int, wanted_port: int | None, kind: EngineKind, model: Path | None, say: Say) -> None:
    """Start everything, say how to try it, and stay until Ctrl-C or SIGTERM. Raises DemoFailed."""
    port, admin_port = choose_ports(wanted_port, say)
    try:
        with _stoppable(), ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-demo-")))
            engines, name = make_engines(count, kind, model, folder)
            stack.callback(_stop_all, engines, say)
            for engine in engines:
                say(f"starting a {'simulated' if kind == 'sim' else 'CPU'} vLLM at {engine.url}")
                engine.start()
            for engine in engines:
                engine.wait_ready()
            config = folder / "gateway.yaml"
            config.write_text(json.dumps(gateway_config([engine.url for engine in engines], port, admin_port)))
            arguments = ["gateway", "serve", "-c", str(config)]
            gateway = ServerProcess("the gateway", f"http://{HOST}:{port}", arguments, "/readyz", None)
            seen = f"http://{HOST}:{admin_port}/admin/backends"
            stack.callback(gateway.stop)
            say(f"starting the gateway at {gateway.url}")
            gateway.start()
            gateway.wait_ready()
            gateway.wait_until(lambda: all_up(read(seen)), "does not report every engine as up")
            say(first_steps(port, admin_port, name, sys.executable))
            _stay(gateway, engines, say)
    except KeyboardInterrupt:
        say("stopped")


def _stay(gateway: ServerProcess, engines: Sequence[ServerProcess], say: Say) -> None:
    running = list(engines)
    while running:
        if not gateway.is_running():
            raise DemoFailed("the gateway exited")
        for engine in [engine for engine in running if not engine.is_running()]:
            running.remove(engine)
            say(f"the engine at {engine.url} has exited; {len(running)} left")
        time.sleep(POLL_SECONDS)
    raise DemoFailed("all engines have exited")


def _stop_all(engines: Sequence[ServerProcess], say: Say) -> None:
    say("stopping")
    for engine in engines:
        if engine.is_running():
            engine.terminate()
    for engine in engines:
        engine.stop()


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
