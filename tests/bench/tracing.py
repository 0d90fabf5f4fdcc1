"""What traces cost: CPU of a request without them, with none sampled, and with some sampled and sent, in turns."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median

from loadtest.console import markdown_table
from tests.bench import measure, peers
from tests.bench.place import Cores, Place
from tests.bench.scenarios import Scenario

LOAD = Scenario("a1", "1 KB chat requests, 32 connections", "1k", 32, 5, 1)
OFF = "off"
_STARTS = 3


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


def compared(place: Place, cores: Cores, ratios: list[float], repetitions: int) -> dict[str, list[float]]:
    """CPU microseconds of a request, by arm: off, and each share of sampled requests. Raises MeasurementFailed."""
    found: dict[str, list[float]] = {}
    with measure.engines(place, cores) as bench, receiver() as url:
        arms = {OFF: {}} | {f"{ratio:.3%}": {"BENCH_TRACES": url, "BENCH_SAMPLE_RATIO": str(ratio)} for ratio in ratios}
        for _ in range(repetitions):
            for name, settings in arms.items():
                found.setdefault(name, []).append(_cost(bench, settings))
    return found


def _cost(bench: measure.Bench, settings: dict[str, str]) -> float:
    """CPU microseconds of a request. On a busy machine a gateway may start too late to answer: it is started again."""
    failure = ""
    for _ in range(_STARTS):
        turn = measure.measure_turn(bench, peers.ours_with(peers.CONFIG, **settings), [LOAD])
        cost = turn.samples[LOAD.name].cpu_us_per_request if not turn.failure else None
        if cost is not None:
            return cost
        failure = turn.failure or "no request was answered"
    raise measure.MeasurementFailed(failure)


def table(found: dict[str, list[float]]) -> str:
    """Medians, and the median of the ratios pair by pair, in Markdown."""
    rows = [
        (
            name,
            f"{median(costs):.1f}",
            f"{median(cost / base for cost, base in zip(costs, found[OFF], strict=True)):.3f}",
        )
        for name, costs in found.items()
    ]
    return markdown_table(("sampled", "µs CPU a request", "ratio"), rows, texts=1)
