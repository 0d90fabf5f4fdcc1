"""GPUs of other machines, by the pages of their exporters."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest.drive.gpu_pages import GpuReading, gpu_readings, keep_gpus
from loadtest.drive.sampling import PageSampler
from loadtest.report.diagnosis import tokens_per_joule
from loadtest.report.schema import GpuSeries, Samples, Throughput

_LABELS = 'gpu="{}",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node-1"'
_DCGM = "\n".join(
    f"{name}{{{_LABELS.format(number)}}} {value}"
    for number in (1, 0)
    for name, value in (
        ("DCGM_FI_DEV_SM_CLOCK", 1980),
        ("DCGM_FI_DEV_GPU_UTIL", 70 + number),
        ("DCGM_FI_DEV_FB_USED", 60000),
        ("DCGM_FI_DEV_FB_FREE", 21000),
        ("DCGM_FI_DEV_POWER_USAGE", 412.5),
    )
)
_AMD_LABELS = 'card_model="MI300X",gpu_id="3",hostname="node-2"'
_AMD = f"""gpu_gfx_activity{{{_AMD_LABELS}}} 97
gpu_used_vram{{{_AMD_LABELS}}} 150000
gpu_total_vram{{{_AMD_LABELS}}} 196592
gpu_average_package_power{{{_AMD_LABELS}}} 640
"""


def test_dcgm_reports_each_gpu_with_model_and_host() -> None:
    name = "NVIDIA H100 80GB HBM3 node-1"
    assert gpu_readings(_DCGM) == [
        GpuReading(f"0 {name}", 70, 60000, memory_total_mib=81000, power_watts=412.5),
        GpuReading(f"1 {name}", 71, 60000, memory_total_mib=81000, power_watts=412.5),
    ]


def test_amds_exporter_is_read_as_well() -> None:
    assert gpu_readings(_AMD) == [GpuReading("3 MI300X node-2", 97, 150000, memory_total_mib=196592, power_watts=640)]
    assert gpu_readings(f"amd_{_AMD}")[0].utilization_percent == 97


def test_other_pages_have_no_gpus() -> None:
    assert gpu_readings('vllm:num_requests_running{engine="0"} 3\n') == []
    assert gpu_readings("") == []


def test_what_an_exporter_does_not_report_is_unknown() -> None:
    assert gpu_readings('DCGM_FI_DEV_GPU_UTIL{gpu="0"} 5\n') == [GpuReading("0", 5)]


def test_a_page_of_endless_gpus_is_refused() -> None:
    page = "\n".join(f'DCGM_FI_DEV_GPU_UTIL{{gpu="{number}"}} 5' for number in range(300))
    with pytest.raises(ValueError, match="more than 256 GPUs"):
        gpu_readings(page)


def test_moments_are_collected_for_each_gpu() -> None:
    series: dict[str, GpuSeries] = {}
    for at in (1.0, 2.0):
        keep_gpus(series, at, "node", gpu_readings(_AMD))
    [gpu] = series.values()
    assert gpu.name == "node 3 MI300X node-2"
    assert (gpu.at, gpu.power_watts) == ([1.0, 2.0], [640.0, 640.0])


def test_tokens_per_joule_need_the_power_of_all_gpus() -> None:
    watts = [9000.0, 300.0, None, 500.0]
    known = GpuSeries(name="0", driver="", memory_total_mib=None, at=[0.0, 1.0, 2.0, 3.0], power_watts=watts)
    unknown = GpuSeries(name="1", driver="", memory_total_mib=None, at=[1.0], power_watts=[None])
    window = Throughput(
        start=1, end=3, requests_per_second=1, output_tokens_per_second=800, prompt_tokens_per_second=1600
    )

    def of(*gpus: GpuSeries) -> float | None:
        return tokens_per_joule(Samples(gpus=list(gpus), no_gpu=None, pages=[]), window)

    assert of(known) == 2
    assert of(known, known) == 1
    assert of(known, unknown) is None
    assert of() is None
    embeddings = window.model_copy(update={"output_tokens_per_second": 0.0})
    assert tokens_per_joule(Samples(gpus=[known], no_gpu=None, pages=[]), embeddings) == 4


class _Exporter(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(_DCGM.encode())

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        return


def test_a_sampled_page_yields_its_gpus() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Exporter) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with PageSampler({"node": f"http://127.0.0.1:{server.server_port}/metrics"}, time.monotonic) as sampler:
            deadline = time.monotonic() + 120
            while not sampler.gpus(0.0) and time.monotonic() < deadline:
                time.sleep(0.01)
        server.shutdown()
    assert [gpu.name for gpu in sampler.gpus(0.0)] == [f"node {n} NVIDIA H100 80GB HBM3 node-1" for n in (0, 1)]
