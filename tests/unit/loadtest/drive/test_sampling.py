"""GPUs and metrics pages, watched for the length of a block."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pynvml
import pytest

from loadtest.access import Access
from loadtest.drive.sampling import PageSampler, Sampling, backend_values, keep, page_values
from loadtest.drive.spelling import pages_of
from loadtest.report.schema import BackendGauges, GpuSeries, PageSeries

_PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m{x}"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 2
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:prefix_cache_queries_total{engine="0"} 1e3
vllm:prefix_cache_hits_total{engine="0"} 250
"""


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "did not happen in 120 s"
        time.sleep(0.01)


class _Waits(threading.Event):
    """Time that passes only in waits."""

    now = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return self.is_set()


def test_ranks_are_added_up_and_the_fullest_cache_counts() -> None:
    assert page_values(_PAGE) == {
        "running": 7,
        "waiting": 2,
        "kv_cache_usage": 0.5,
        "prefix_queries": 1000,
        "prefix_hits": 250,
    }
    assert page_values("") == {}


def test_a_gateway_reports_what_is_in_flight_on_each_backend_and_what_may_be() -> None:
    page = """gateway_backend_in_flight{backend="a"} 3
gateway_backend_in_flight{backend="say \\"b\\""} 4
gateway_backend_in_flight_limit{backend="a"} 8
gateway_queued_requests{model="m"} 1
"""
    assert page_values(page) == {"running": 7, "waiting": 1}
    assert backend_values(page) == {"a": {"in_flight": 3, "limit": 8}, 'say "b"': {"in_flight": 4}}


def test_a_backend_that_comes_later_is_not_reported_before() -> None:
    series = PageSeries(name="gateway", url="u")
    keep(series, 0.0, {"running": 1}, {"a": {"in_flight": 1, "limit": 8}})
    keep(series, 1.0, {"running": 2}, {"b": {"in_flight": 2, "limit": 4}})
    assert series.backends["a"] == BackendGauges(in_flight=[1, None], limit=[8, None])
    assert series.backends["b"] == BackendGauges(in_flight=[None, 2], limit=[None, 4])
    assert (series.at, series.running) == ([0.0, 1.0], [1, 2])


@pytest.fixture
def page() -> Iterator[str]:
    """A server of metrics that fails every second time."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if len(asked) % 2 else 503)
            self.end_headers()
            self.wfile.write(_PAGE.encode())

        def log_message(self, *args: Any) -> None:
            """Stays silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def _sampled(url: str, enough: Callable[[PageSeries], bool]) -> PageSeries:
    waits = _Waits()
    sampler = PageSampler({"a": url}, lambda: waits.now)
    sampler._over = waits
    with sampler:
        _until(lambda: enough(sampler._series[0]))
    [series] = sampler.series(origin=-1.0)
    return series


def test_a_page_is_read_every_second_until_the_block_ends_and_failures_are_counted(page: str) -> None:
    series = _sampled(page, lambda series: len(series.at) >= 2)
    assert series.running[:2] == [7, 7]
    assert series.kv_cache_usage[0] == 0.5
    assert series.at[:2] == [1.0, 3.0]  # the read in between failed
    assert series.failures >= 1


def test_a_page_that_is_not_there_is_a_failure() -> None:
    gone = _sampled("http://127.0.0.1:1/metrics", lambda series: series.failures >= 1)
    assert gone.at == []


def test_a_page_that_is_cut_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(
            target=_answer, args=(listener, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        )
        answering.start()
        cut = _sampled(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", lambda series: series.failures >= 1)
        answering.join()
    assert cut.at == []


def _answer(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(answer)


def test_everything_is_watched_together(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    with Sampling({"a": page}, Access(), page) as sampling:
        pass
    samples = sampling.samples(0.0)
    assert samples.no_gpu == "no GPU: NVML Shared Library Not Found"
    assert [series.name for series in samples.pages] == ["a"]


def test_gpus_that_exporters_report_are_watched_instead_of_those_of_this_machine(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, of_engines = (GpuSeries(name=name, driver="", memory_total_mib=1.0) for name in ("own", "of engines"))
    sampling = Sampling({"a": page}, Access(), page)
    monkeypatch.setattr(sampling._gpus, "series", lambda _: [own])
    assert sampling.samples(0.0).gpus == [own]
    monkeypatch.setattr(sampling._pages, "gpus", lambda _: [of_engines])
    assert sampling.samples(0.0).gpus == [of_engines]


def test_pages_are_named_by_the_user_or_by_their_host() -> None:
    assert pages_of("a=http://h1:1/metrics, http://h2:2/metrics?x=1,h3:3/metrics") == {
        "a": "http://h1:1/metrics",
        "h2:2": "http://h2:2/metrics?x=1",
        "h3:3": "http://h3:3/metrics",
    }
