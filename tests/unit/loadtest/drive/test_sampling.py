"""GPUs and metrics pages, watched for the length of a block."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loadtest.drive.sampling import GpuSampler, PageSampler, Sampling, backend_values, keep, page_values
from loadtest.drive.spelling import pages_of
from loadtest.report.samples import samples_rows
from loadtest.report.schema import BackendGauges, PageSeries, Samples

pytestmark = pytest.mark.flaky(reruns=2)  # clocks of a shared machine: what holds, holds in one of three tries

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
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not happen in 20 s"
        time.sleep(0.01)


def _nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "pid"


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_each_gpu_is_followed_and_the_program_ends_with_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "echo '0, Big GPU, 555.1, 87, 1024, 2048, 300.5'; echo '1, Big GPU, 555.1, [N/A], 0, 2048, [N/A]'"
    pid_file = _nvidia_smi(tmp_path, f"while true; do {lines}; sleep 0.02; done", monkeypatch)
    with GpuSampler(time.monotonic) as sampler:
        _until(lambda: len(sampler._gpus) == 2 and len(sampler._gpus["1"].at) > 2)
    first, second = sampler.series(origin=0.0)
    assert (first.name, first.driver, first.memory_total_mib) == ("0 Big GPU", "555.1", 2048)
    assert set(first.utilization_percent) == {87}
    assert set(second.utilization_percent) == {None}
    assert len(first.at) == len(first.power_watts)
    assert sampler.missing is None
    assert _gone(int(pid_file.read_text()))


def test_that_there_is_no_gpu_is_reported_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nvidia_smi(tmp_path, "echo 'NVIDIA-SMI has failed: no driver'; exit 9", monkeypatch)
    with GpuSampler(time.monotonic) as sampler:
        _until(lambda: sampler._process is not None and sampler._process.poll() is not None)
    assert sampler.missing == "no GPU: nvidia-smi says NVIDIA-SMI has failed: no driver"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with GpuSampler(time.monotonic) as sampler:
        pass
    assert sampler.missing == "no GPU: nvidia-smi is not installed here"


def test_gpus_stand_in_the_order_of_their_numbers_whatever_they_do_not_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = ["[N/A]", "[Not Supported]", "[Unknown Error]"]  # a GPU in MIG mode, an old one, one that is ill
    lines = "\n".join(
        f"echo '{n}, NVIDIA A100, 555.1, {reported[n % 3]}, {reported[n % 3]}, 81920, 61.2'" for n in range(11)
    )
    _nvidia_smi(tmp_path, f"{lines}\nsleep 60", monkeypatch)
    with GpuSampler(time.monotonic) as sampler:
        _until(lambda: len(sampler._gpus) == 11)
    found = sampler.series(origin=0.0)
    assert [gpu.name for gpu in found] == [f"{n} NVIDIA A100" for n in range(11)]
    assert {(*gpu.utilization_percent, *gpu.memory_used_mib, *gpu.power_watts) for gpu in found} == {(None, None, 61.2)}


def test_a_gpu_that_is_lost_during_the_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "Unable to determine the device handle for GPU0: GPU is lost."
    _nvidia_smi(tmp_path, f"echo '0, Big GPU, 555.1, 87, 1, 2, 3'; echo '{lost}'; exit 15", monkeypatch)
    with GpuSampler(time.monotonic) as sampler:
        _until(lambda: sampler._process is not None and sampler._process.poll() is not None)
    assert len(sampler.series(origin=0.0)) == 1
    assert sampler.missing == f"nvidia-smi ended during the run, exit code 15: {lost}"
    reported = samples_rows(Samples(gpus=sampler.series(0.0), no_gpu=sampler.missing, pages=[]))
    assert [what for what, _ in reported] == ["GPU 0 Big GPU", "GPU"]


def test_a_program_that_cannot_be_run_is_reported_and_one_that_hangs_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _nvidia_smi(tmp_path, "trap '' TERM; while true; do sleep 0.05; done", monkeypatch)
    monkeypatch.setattr("loadtest.drive.sampling._END_SECONDS", 0.2)
    with GpuSampler(time.monotonic) as sampler:
        _until(lambda: program.exists() and bool(program.read_text()))
    assert sampler.missing == "no GPU: nvidia-smi says nothing"
    assert _gone(int(program.read_text()))
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF, but not for this machine")
    with GpuSampler(time.monotonic) as sampler:
        pass
    assert sampler.missing == "no GPU: nvidia-smi cannot be run: Exec format error"


def test_ranks_are_added_up_and_the_fullest_cache_counts() -> None:
    assert page_values(_PAGE) == {
        "running": 7, "waiting": 2, "kv_cache_usage": 0.5, "prefix_queries": 1000, "prefix_hits": 250,
    }  # fmt: skip
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


def test_pages_are_read_until_the_block_ends_and_failures_are_counted(page: str) -> None:
    origin = time.monotonic()
    with PageSampler({"a": page, "gone": "http://127.0.0.1:1/metrics"}, time.monotonic) as sampler:
        _until(lambda: len(sampler._series[0].at) >= 2)
    first, gone = sampler.series(origin)
    assert first.running[:2] == [7, 7]
    assert first.kv_cache_usage[0] == 0.5
    assert first.failures >= 1
    assert 1.5 < first.at[1] - first.at[0] < 5  # the read in between failed
    assert gone.at == []
    assert gone.failures >= 1


def test_everything_is_watched_together(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with Sampling({"a": page}) as sampling:
        pass
    samples = sampling.samples(0.0)
    assert samples.no_gpu is not None
    assert [series.name for series in samples.pages] == ["a"]


def test_pages_are_named_by_the_user_or_by_their_host() -> None:
    assert pages_of("a=http://h1:1/metrics, http://h2:2/metrics?x=1,h3:3/metrics") == {
        "a": "http://h1:1/metrics",
        "h2:2": "http://h2:2/metrics?x=1",
        "h3:3": "http://h3:3/metrics",
    }
