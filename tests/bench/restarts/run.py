"""One run of the restart bench: engines, the gateway and the load as processes, and the restarts."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from loadtest.servers.processes import Guard, stop
from loadtest.servers.server import Server, ServerFailed, ask, get, simulated_engine
from tests.bench.gateway_process import GatewayProcess, read_metrics, serving, wait_until_ready
from tests.bench.restarts.load import LoadOptions, Sent, read
from tests.bench.restarts.requests import CHAT_MODEL, EMBEDDING_MODEL
from tests.processes import is_there

CHAT_ENGINES = 2
CHAT_CAP, EMBEDDING_CAP = 16, 128
LONG_STREAMS = 6
_CHAT_FLAGS = (
    *("--model", CHAT_MODEL, "--time-scale", "1.25", "--max-num-seqs", str(CHAT_CAP)),
    *("--kv-tokens", "128000", "--max-num-batched-tokens", "2048"),
)
_EMBEDDING_FLAGS = ("--embedding", "--model", EMBEDDING_MODEL, "--time-scale", "0.25")
_LOOK_SECONDS = 0.2
_DRAIN_SECONDS = 200.0
_END_SECONDS = 30.0
_RESTART_SECONDS = 150.0
_HARMLESS = {"max_connections_lowered"}


@dataclass(frozen=True)
class Options:
    """One run. `window_seconds`: of load before the first and after the last restart, for the hit rates."""

    requests_per_second: float
    restarts: int
    seconds_between: float
    longest_stream_seconds: float
    warm_up_seconds: float
    window_seconds: float
    cold: bool
    seed: int
    folder: Path


@dataclass(frozen=True)
class Restart:
    """When the command began and ended, and the memory of the process that it replaced."""

    begun: float
    ended: float
    rss_bytes: int


@dataclass
class Measured:
    """What a run gives. `before`, `after` and `cold` begin a window each; None = there was no cold start."""

    options: Options
    before: float = 0.0
    after: float = 0.0
    cold: float | None = None
    sent: list[Sent] = field(default_factory=list)
    sent_cold: list[Sent] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    peaks: list[tuple[str, int, int]] = field(default_factory=list)  # engine, most sequences at once, cap
    most_alive: int = 1
    last_ended_seconds: float | None = None  # from the last answer until only one process was left; None = not
    last_rss_bytes: int = 0
    troubles: list[str] = field(default_factory=list)  # lines of the gateway's log


class Generations:
    """The gateway's processes."""

    def __init__(self, pid: int) -> None:
        self.pids = [pid]
        self.most_alive = 1

    def look(self) -> int:
        """How many run now."""
        alive = sum(map(is_there, self.pids))
        self.most_alive = max(self.most_alive, alive)
        return alive

    def watch(self, seconds: float, ended: Callable[[], bool] = lambda: False) -> None:
        """Wait, and look now and then. Raises ServerFailed if the last process ends."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not ended():
            if not is_there(self.pids[-1]):
                raise ServerFailed(f"the gateway's process {self.pids[-1]} has ended")
            self.look()
            time.sleep(_LOOK_SECONDS)


def rss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def measure(options: Options, say: Callable[[str], None]) -> Measured:
    """Raises ServerFailed, and OSError if a restart is refused."""
    measured = Measured(options)
    with ExitStack() as stack:
        engines = _engines(options.folder, stack)
        with _gateway(engines, options.folder / "state") as gateway:
            _restart_under_load(gateway, measured, say)
            measured.troubles = _troubles(gateway.server.log)
        if options.cold:
            say("a cold start: without state, the engines' caches as they are")
            with _gateway(engines, None) as gateway, _load(gateway.port, options, "cold") as load:
                measured.cold = time.monotonic()
                Generations(gateway.pid).watch(options.window_seconds)
                load.end()
                measured.sent_cold = load.sent()
        measured.peaks = [(name, _peak(each), cap) for name, each, cap in engines]
    return measured


def _restart_under_load(gateway: GatewayProcess, measured: Measured, say: Callable[[str], None]) -> None:
    options, generations = measured.options, Generations(gateway.pid)
    with _load(gateway.port, options, "load") as load:
        say(f"warming up for {options.warm_up_seconds:g} s")
        generations.watch(options.warm_up_seconds)
        measured.before = time.monotonic()
        generations.watch(options.window_seconds)
        for number in range(1, options.restarts + 1):
            begun, rss = time.monotonic(), rss_bytes(generations.pids[-1])
            answer = ask(f"http://127.0.0.1:{gateway.admin_port}/admin/restart", timeout_seconds=_RESTART_SECONDS)
            measured.restarts.append(Restart(begun, time.monotonic(), rss))
            generations.pids.append(json.loads(answer)["pid"])
            seconds = measured.restarts[-1].ended - begun
            say(f"restart {number} of {options.restarts}: {seconds:.1f} s, {generations.look()} processes")
            if number < options.restarts:
                generations.watch(options.seconds_between)
        measured.after = time.monotonic()
        generations.watch(options.window_seconds)
        measured.last_rss_bytes = rss_bytes(generations.pids[-1])
        say("waiting for the last answers")
        load.end()
        generations.watch(_DRAIN_SECONDS, load.has_ended)
        measured.sent = load.sent()
    ended = time.monotonic()
    generations.watch(_END_SECONDS, lambda: generations.look() == 1)
    measured.last_ended_seconds = time.monotonic() - ended if generations.look() == 1 else None
    measured.most_alive = generations.most_alive


def _engines(folder: Path, stack: ExitStack) -> list[tuple[str, Server, int]]:
    flags = [(f"chat-{number}", _CHAT_FLAGS, CHAT_CAP) for number in range(CHAT_ENGINES)]
    flags.append(("embeddings", _EMBEDDING_FLAGS, EMBEDDING_CAP))
    found = []
    for name, given, cap in flags:
        server = simulated_engine(given, folder / f"{name}.log")
        found.append((name, stack.enter_context(server), cap))
    return found


@contextmanager
def _gateway(engines: list[tuple[str, Server, int]], state: Path | None) -> Iterator[GatewayProcess]:
    sections = {
        "backends": [{"url": each.url, "max_in_flight": cap} for _, each, cap in engines],
        "health": {"slow_start_seconds": 0},
        "state": {"path": None if state is None else str(state)},
    }
    with serving(sections) as gateway:
        wait_until_ready(gateway)
        yield gateway


class LoadProcess:
    """The load, running."""

    def __init__(self, process: "subprocess.Popen[bytes]", file: Path) -> None:
        self._process, self._file = process, file

    def end(self) -> None:
        """No more requests; returns at once."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def sent(self) -> list[Sent]:
        """What has ended. Raises ServerFailed if the load failed."""
        if self._process.poll():
            raise ServerFailed(f"the load ended with exit code {self._process.returncode}")
        return read(self._file)


@contextmanager
def _load(port: int, options: Options, name: str) -> Iterator[LoadProcess]:
    file = options.folder / f"{name}.jsonl"
    seed = options.seed if name == "load" else options.seed + 1
    given = LoadOptions(
        port, options.requests_per_second, LONG_STREAMS, options.longest_stream_seconds, seed, str(file)
    )
    command = [sys.executable, "-m", "tests.bench.restarts.load", msgspec.json.encode(given).decode()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    guard = Guard(process.pid)
    try:
        yield LoadProcess(process, file)
    finally:
        stop(process)
        guard.dismiss()


def _peak(engine: Server) -> int:
    page = read_metrics(get(f"{engine.url}/metrics").decode())
    return int(max(value for name, value in page.items() if name.startswith("sim_peak_requests")))


def _troubles(log: Path) -> list[str]:
    """The errors and warnings in the gateway's log."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            found.append(line)
            continue
        if entry.get("level") not in ("info", "debug") and entry.get("event") not in _HARMLESS:
            found.append(line)
    return found
