"""The GPUs of this machine, as NVML (the library of NVIDIA's driver) reports them: access, and samples during a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

try:
    import pynvml as pynvml
except ModuleNotFoundError as missing:
    raise SystemExit("The load tester needs more packages: pip install 'vllm-batching-gateway[loadtest]'") from missing

from loadtest.report.schema import GpuSeries

_Value = TypeVar("_Value")
_INTERVAL_SECONDS = 0.5
ANSWER_SECONDS = 5.0
MIB = 2**20
NONE_LISTED = "NVML lists none"
SILENT = "NVML does not answer"
# After these nothing more can be asked. Any other error is about one figure.
_LOST = (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired, pynvml.NVMLError_Uninitialized)


class GpuSampler:
    """Asks NVML inside the block. `missing` gives the reason why there are no figures, or no more."""

    def __init__(self, clock: Callable[[], float], nvml: Any = pynvml) -> None:
        self._clock = clock
        self._nvml = nvml
        self._over = threading.Event()
        # A driver that hangs never lets go of the thread; the run does not wait for it.
        self._thread = threading.Thread(target=self._follow, name="gpus", daemon=True)
        self._gpus: list[GpuSeries] = []
        self.missing: str | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(ANSWER_SECONDS)
        if self._thread.is_alive():
            self._end(SILENT)

    def series(self, origin: float) -> list[GpuSeries]:
        """One for each GPU; call it after the block. Times count from `origin`."""
        return [gpu.model_copy(update={"at": [round(moment - origin, 3) for moment in gpu.at]}) for gpu in self._gpus]

    def _follow(self) -> None:
        try:
            with devices_of(self._nvml) as devices:
                gpus = [self._unsampled(number, device) for number, device in enumerate(devices)]
                while gpus:
                    for gpu, device in zip(gpus, devices, strict=True):
                        self._sample(gpu, device)
                    self._gpus = gpus
                    if self._over.wait(_INTERVAL_SECONDS):
                        return
                self._end(NONE_LISTED)
        except pynvml.NVMLError as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        self.missing = f"no more figures during the run: {why}" if self._gpus else f"no GPU: {why}"

    def _unsampled(self, number: int, device: Any) -> GpuSeries:
        return GpuSeries(
            name=f"{number} {self._nvml.nvmlDeviceGetName(device)}",
            driver=self._nvml.nvmlSystemGetDriverVersion(),
            memory_total_mib=reported(lambda: float(memory_of(self._nvml, device).total // MIB)),
        )

    def _sample(self, gpu: GpuSeries, device: Any) -> None:
        nvml = self._nvml
        busy = reported(lambda: float(nvml.nvmlDeviceGetUtilizationRates(device).gpu))
        used = reported(lambda: float(memory_of(nvml, device).used // MIB))
        power = reported(lambda: round(nvml.nvmlDeviceGetPowerUsage(device) / 1000, 2))
        gpu.at.append(self._clock())
        gpu.utilization_percent.append(busy)
        gpu.memory_used_mib.append(used)
        gpu.power_watts.append(power)


@contextmanager
def devices_of(nvml: Any) -> Iterator[Sequence[Any]]:
    """The handles of all GPUs, while NVML is open. Raises NVMLError."""
    nvml.nvmlInit()
    try:
        yield [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def reported(read: Callable[[], _Value]) -> _Value | None:
    """None for what a GPU does not report, such as its utilisation in MIG mode."""
    try:
        return read()
    except _LOST:
        raise
    except pynvml.NVMLError:
        return None


def memory_of(nvml: Any, device: Any) -> Any:
    # The first version counts what the driver reserves as used; nvidia-smi and this one do not.
    return nvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2)
