"""What traces cost: CPU of a request without them, with none sampled, and with some sampled and sent, side by side."""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import fmean, median

from loadtest.compare.proxy import started
from loadtest.console import markdown_table
from loadtest.report.statistics import mean_interval
from loadtest.servers.processes import bound_to, cpu_seconds_between, cpu_times
from loadtest.servers.server import ServerFailed
from loadtest.workloads.prompts import Endpoint
from tests.bench import measure, peers
from tests.bench.place import Cores, Place, choose_ports
from tests.bench.scenarios import Scenario

LOAD = Scenario("a1", "1 KB chat requests, 32 connections", "1k", 32, 2, 0.25)
OFF = "off"
_EXPORT_SECONDS = 6.0  # in which what a gateway has sampled is sent


class _Receiver(BaseHTTPRequestHandler):
    """Takes every export."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing of each export."""


@contextmanager
def receiver() -> Iterator[str]:
    """The URL of an OTLP receiver in this process, which is not on the proxy's core."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def compared(place: Place, cores: Cores, ratios: list[float], rounds: int) -> dict[str, list[float]]:
    """CPU microseconds of a request, by arm: off, and each share of sampled requests. Raises MeasurementFailed.

    All gateways run the whole time, and get the load in turns of a few seconds, so that other work on the machine falls
    on all of them alike. A round counts all that a gateway spent in it: traces are sent while another has the load.
    """
    found: dict[str, list[float]] = {}
    with measure.engines(place, cores) as bench, receiver() as url, ExitStack() as stack:
        arms: dict[str, dict[str, str]] = {OFF: {}}
        arms |= {f"{ratio:.3%}": {"BENCH_TRACES": url, "BENCH_SAMPLE_RATIO": str(ratio)} for ratio in ratios}
        running = {name: _start(stack, bench, name, settings) for name, settings in arms.items()}
        for each in running.values():
            each.load(bench)  # what a first request costs is not of interest
        for number in range(rounds):
            before = {name: cpu_times(each.pid) for name, each in running.items()}
            order = sorted(running, key=lambda name: (list(running).index(name) + number) % len(running))
            requests = {name: running[name].load(bench) for name in order}
            time.sleep(_EXPORT_SECONDS)
            for name, each in running.items():
                seconds = cpu_seconds_between(before[name], cpu_times(each.pid))
                found.setdefault(name, []).append(seconds / requests[name] * 1e6)
    return found


@dataclass(frozen=True)
class _Arm:
    """A gateway that runs with one setting."""

    pid: int
    port: int

    def load(self, bench: measure.Bench) -> int:
        """Put the load on it; gives the number of requests, with those of the warm-up. Raises MeasurementFailed."""
        with bound_to({bench.cores.load}):
            done = subprocess.run(LOAD.arguments(bench.place, self.port), capture_output=True, text=True, check=False)
        printed = measure.parse_load(done.stdout)
        if any(printed.errors.values()) or not printed.all_requests:
            raise measure.MeasurementFailed(f"requests failed: {done.stdout}")
        return printed.all_requests


def _start(stack: ExitStack, bench: measure.Bench, name: str, settings: dict[str, str]) -> _Arm:
    place, ports = bench.place, choose_ports(bench.engines)
    peer = peers.ours_with(peers.CONFIG, False, **settings)
    log = place.logs / f"tracing-{name}.log"
    try:
        server = stack.enter_context(
            started(peer, place.peers, peers.setting(place, ports), log, Endpoint.CHAT, bench.cores.proxy)
        )
    except ServerFailed as failed:
        raise measure.MeasurementFailed(str(failed)) from failed
    return _Arm(server.pid, ports.proxy)


def table(found: dict[str, list[float]]) -> str:
    """Medians, and the mean of the ratios pair by pair with its 95 % interval, in Markdown."""
    rows = []
    for name, costs in found.items():
        ratios = [cost / base for cost, base in zip(costs, found[OFF], strict=True)]
        low, high = mean_interval(ratios) or (fmean(ratios),) * 2
        rows.append((name, f"{median(costs):.1f}", f"{fmean(ratios):.3f}", f"{low:.3f} to {high:.3f}"))
    return markdown_table(("sampled", "µs CPU a request", "ratio", "95 % interval"), rows, texts=1)
