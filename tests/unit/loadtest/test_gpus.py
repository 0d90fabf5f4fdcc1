"""What NVML reports of GPUs, and what of it is kept."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from loadtest.checkpoint.machine import hardware
from loadtest.gpus import GpuSampler
from loadtest.report.samples import samples_rows
from loadtest.report.schema import Samples

_MIB = 2**20
_WORKING: dict[str, Any] = {
    "Name": "Big GPU",
    "UUID": "GPU-1",
    "UtilizationRates": SimpleNamespace(gpu=87, memory=12),
    "MemoryInfo": SimpleNamespace(total=81559 * _MIB, used=1024 * _MIB + 5),
    "PowerUsage": 300_517,
    "MigMode": [0, 1],
    "EccMode": [1, 1],
    "PersistenceMode": 1,
    "EnforcedPowerLimit": 700_000,
    "ClockInfo": {pynvml.NVML_CLOCK_SM: 345, pynvml.NVML_CLOCK_MEM: 2619},
    "MaxClockInfo": {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 2619},
    "Clock": pynvml.NVMLError_NotSupported(),
    "CurrPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 16,
}


class _Nvml:
    """NVML in memory: what each GPU answers to nvmlDeviceGet..., by the rest of the name. Errors are raised."""

    def __init__(self, *gpus: dict[str, Any], pairs: dict[tuple[int, int], int] | None = None) -> None:
        self.gpus = [_WORKING | gpu for gpu in gpus]
        self.linked: set[tuple[int, int]] = set()
        self.pairs = pairs or {}
        self.opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetMemoryInfo(self, device: int, version: int) -> Any:
        assert version == pynvml.nvmlMemory_v2
        return self._answer(device, "MemoryInfo")

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        assert kind == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        return pynvml.NVML_P2P_STATUS_OK if (one, other) in self.linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        if (one, other) not in self.pairs:
            raise pynvml.NVMLError_NotSupported
        return self.pairs[one, other]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(device: int, *arguments: int) -> Any:
            answer = self._answer(device, name.removeprefix("nvmlDeviceGet"))
            return answer[arguments[0]] if isinstance(answer, dict) else answer

        return ask

    def _answer(self, device: int, what: str) -> Any:
        answer = self.gpus[device][what]
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Rounds(threading.Event):
    """Ends the sampling after some rounds, without waiting; what is planned for a round's end happens there."""

    def __init__(self, rounds: int, at_the_end_of: dict[int, Callable[[], None]] | None = None) -> None:
        super().__init__()
        self.rounds = rounds
        self.done = 0
        self.at_the_end_of = at_the_end_of or {}

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 0.5
        self.done += 1
        self.at_the_end_of.get(self.done, lambda: None)()
        return self.done == self.rounds


def _sampled(nvml: _Nvml, rounds: _Rounds) -> GpuSampler:
    sampler = GpuSampler(lambda: 10.0 + rounds.done / 2, nvml)
    sampler._over = rounds
    with sampler:
        pass
    assert nvml.opened == 0
    return sampler


def test_each_gpu_is_followed_until_the_block_ends() -> None:
    nvml = _Nvml({}, {"UtilizationRates": SimpleNamespace(gpu=0), "PowerUsage": 61_200})
    sampler = _sampled(nvml, _Rounds(3))
    first, second = sampler.series(origin=10.0)
    assert (first.name, first.driver, first.memory_total_mib) == ("0 Big GPU", "570.86.15", 81559)
    assert first.at == [0.0, 0.5, 1.0]
    assert first.utilization_percent == [87, 87, 87]
    assert first.memory_used_mib == [1024, 1024, 1024]
    assert first.power_watts == [300.52, 300.52, 300.52]
    assert (second.name, second.utilization_percent, second.power_watts) == ("1 Big GPU", [0] * 3, [61.2] * 3)
    assert sampler.missing is None


def test_a_block_that_ends_at_once_has_one_sample() -> None:
    with GpuSampler(lambda: 10.0, _Nvml({})) as sampler:
        pass
    [gpu] = sampler.series(origin=10.0)
    assert gpu.at[:1] == [0.0]


@pytest.mark.parametrize("error", [pynvml.NVMLError_NotSupported, pynvml.NVMLError_Unknown])
def test_gpus_stand_in_the_order_of_their_numbers_whatever_they_do_not_report(error: type[Exception]) -> None:
    silent = {"UtilizationRates": error(), "MemoryInfo": error()}
    found = _sampled(_Nvml(*[silent] * 11), _Rounds(1)).series(origin=0.0)
    assert [gpu.name for gpu in found] == [f"{number} Big GPU" for number in range(11)]
    assert {gpu.memory_total_mib for gpu in found} == {None}
    assert {(*gpu.utilization_percent, *gpu.memory_used_mib, *gpu.power_watts) for gpu in found} == {
        (None, None, 300.52)
    }


def test_a_gpu_that_is_lost_during_the_run_is_reported() -> None:
    nvml = _Nvml({})
    sampler = _sampled(nvml, _Rounds(9, {2: lambda: nvml.gpus[0].update(MemoryInfo=pynvml.NVMLError_GpuIsLost())}))
    [gpu] = sampler.series(origin=10.0)
    assert (gpu.at, gpu.utilization_percent, gpu.memory_used_mib) == ([0.0, 0.5], [87, 87], [1024, 1024])
    assert sampler.missing == "no more figures during the run: GPU is lost"
    reported = samples_rows(Samples(gpus=sampler.series(0.0), no_gpu=sampler.missing, pages=[]))
    assert [what for what, _ in reported] == ["GPU 0 Big GPU", "GPU"]


def test_that_there_is_no_gpu_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _sampled(_Nvml(), _Rounds(1)).missing == "no GPU: NVML lists none"
    assert hardware(_Nvml()).no_gpu == "no GPU: NVML lists none"
    lost = _Nvml({"Name": pynvml.NVMLError_GpuIsLost()})
    assert _sampled(lost, _Rounds(1)).missing == "no GPU: GPU is lost"
    assert hardware(lost).no_gpu == "no GPU: GPU is lost"

    def no_library() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(lost, "nvmlInit", no_library)
    assert _sampled(lost, _Rounds(1)).missing == "no GPU: NVML Shared Library Not Found"
    assert hardware(lost).no_gpu == "no GPU: NVML Shared Library Not Found"


def test_a_driver_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.gpus.ANSWER_SECONDS", 0)
    monkeypatch.setattr("loadtest.checkpoint.machine.ANSWER_SECONDS", 0)
    answers, nvml = threading.Event(), _Nvml({})
    monkeypatch.setattr(nvml, "nvmlInit", answers.wait)
    with GpuSampler(lambda: 0.0, nvml) as sampler:
        pass
    assert sampler.missing == "no GPU: NVML does not answer"
    assert hardware(nvml).no_gpu == "no GPU: NVML does not answer"
    answers.set()
    sampler._thread.join()


def test_a_gpu_reports_its_mode_and_clocks() -> None:
    nvml = _Nvml({})
    found = hardware(nvml)
    assert nvml.opened == 0
    assert (found.no_gpu, found.driver, found.cuda, found.topology) == (None, "570.86.15", "12.8", "")
    [gpu] = found.gpus
    assert (gpu.name, gpu.uuid, gpu.memory) == ("Big GPU", "GPU-1", "81559 MiB")
    assert (gpu.mig, gpu.ecc, gpu.persistence) == ("Disabled", "Enabled", "Enabled")
    assert (gpu.power_limit, gpu.pcie) == ("700.00 W", "gen 5 x 16x")
    assert (gpu.clocks["sm"], gpu.clocks["sm max"], gpu.clocks["sm set"]) == ("345 MHz", "1980 MHz", "N/A")
    assert (gpu.clocks["memory"], gpu.clocks["memory max"]) == ("2619 MHz", "2619 MHz")


def test_what_a_gpu_does_not_report_is_not_available() -> None:
    [gpu] = hardware(_Nvml(dict.fromkeys(_WORKING, pynvml.NVMLError_NotSupported()))).gpus
    assert {*gpu.model_dump(exclude={"clocks", "pcie"}).values(), *gpu.clocks.values()} == {"N/A"}
    assert gpu.pcie == "gen N/A x N/A"


def test_the_topology_names_the_connection_of_each_pair() -> None:
    nvml = _Nvml({}, {}, {}, pairs={(0, 2): pynvml.NVML_TOPOLOGY_SYSTEM})
    nvml.linked = {(0, 1)}
    assert hardware(nvml).topology == "GPU0-GPU1: NVLink\nGPU0-GPU2: SYS\nGPU1-GPU2: N/A"


def test_every_function_that_is_asked_is_one_of_the_library() -> None:
    asked = {*(f"nvmlDeviceGet{what}" for what in _WORKING), *(name for name in vars(_Nvml) if name.startswith("nvml"))}
    assert {name for name in asked if not callable(getattr(pynvml, name, None))} == set()
