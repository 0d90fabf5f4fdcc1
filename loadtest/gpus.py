"""The GPUs of this machine, as NVML (the library of NVIDIA's driver) reports them: what they are, what a run uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, Self, TypeVar

import pynvml

from loadtest.checkpoint.document import Gpu, Hardware
from loadtest.report.schema import GpuSeries

_Value = TypeVar("_Value")
_INTERVAL_SECONDS = 0.5
_END_SECONDS = 5.0
_MIB = 2**20
_NONE_LISTED = "NVML lists none"
# After these nothing more can be asked. Any other error is about one figure.
_LOST = (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired, pynvml.NVMLError_Uninitialized)
_SWITCH = ("Disabled", "Enabled")
# The words of `nvidia-smi topo -m`.
_PATHS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "same board",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}


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
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._end("NVML does not answer")

    def series(self, origin: float) -> list[GpuSeries]:
        """One for each GPU; call it after the block. Times count from `origin`."""
        return [gpu.model_copy(update={"at": [round(moment - origin, 3) for moment in gpu.at]}) for gpu in self._gpus]

    def _follow(self) -> None:
        try:
            with _devices(self._nvml) as devices:
                gpus = [self._unsampled(number, device) for number, device in enumerate(devices)]
                while gpus:
                    for gpu, device in zip(gpus, devices, strict=True):
                        self._sample(gpu, device)
                    self._gpus = gpus
                    if self._over.wait(_INTERVAL_SECONDS):
                        return
                self._end(_NONE_LISTED)
        except pynvml.NVMLError as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        self.missing = f"no more figures during the run: {why}" if self._gpus else f"no GPU: {why}"

    def _unsampled(self, number: int, device: Any) -> GpuSeries:
        return GpuSeries(
            name=f"{number} {self._nvml.nvmlDeviceGetName(device)}",
            driver=self._nvml.nvmlSystemGetDriverVersion(),
            memory_total_mib=_reported(lambda: float(_memory(self._nvml, device).total // _MIB)),
        )

    def _sample(self, gpu: GpuSeries, device: Any) -> None:
        nvml = self._nvml
        busy = _reported(lambda: float(nvml.nvmlDeviceGetUtilizationRates(device).gpu))
        used = _reported(lambda: float(_memory(nvml, device).used // _MIB))
        power = _reported(lambda: round(nvml.nvmlDeviceGetPowerUsage(device) / 1000, 2))
        gpu.at.append(self._clock())
        gpu.utilization_percent.append(busy)
        gpu.memory_used_mib.append(used)
        gpu.power_watts.append(power)


def hardware(nvml: Any = pynvml) -> Hardware:
    """What the GPUs are and how they are set; says so where there is none."""
    try:
        with _devices(nvml) as devices:
            if not devices:
                return Hardware(no_gpu=f"no GPU: {_NONE_LISTED}")
            cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
            return Hardware(
                no_gpu=None,
                driver=nvml.nvmlSystemGetDriverVersion(),
                cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
                gpus=[_gpu(nvml, device) for device in devices],
                topology=_topology(nvml, devices),
            )
    except pynvml.NVMLError as error:
        return Hardware(no_gpu=f"no GPU: {error}")


@contextmanager
def _devices(nvml: Any) -> Iterator[Sequence[Any]]:
    """The handles of all GPUs, while NVML is open. Raises NVMLError."""
    nvml.nvmlInit()
    try:
        yield [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _reported(read: Callable[[], _Value]) -> _Value | None:
    """None for what a GPU does not report, such as its utilisation in MIG mode."""
    try:
        return read()
    except _LOST:
        raise
    except pynvml.NVMLError:
        return None


def _memory(nvml: Any, device: Any) -> Any:
    # The first version counts what the driver reserves as used; nvidia-smi and this one do not.
    return nvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2)


def _gpu(nvml: Any, device: Any) -> Gpu:
    def text(read: Callable[[], object]) -> str:
        value = _reported(read)
        return "N/A" if value is None else str(value)

    generation = text(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(device))
    width = text(lambda: f"{nvml.nvmlDeviceGetCurrPcieLinkWidth(device)}x")
    sm, memory, graphics = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM, pynvml.NVML_CLOCK_GRAPHICS
    application = pynvml.NVML_CLOCK_ID_APP_CLOCK_TARGET
    return Gpu(
        name=text(lambda: nvml.nvmlDeviceGetName(device)),
        uuid=text(lambda: nvml.nvmlDeviceGetUUID(device)),
        memory=text(lambda: f"{_memory(nvml, device).total // _MIB} MiB"),
        mig=text(lambda: _SWITCH[nvml.nvmlDeviceGetMigMode(device)[0]]),
        ecc=text(lambda: _SWITCH[nvml.nvmlDeviceGetEccMode(device)[0]]),
        persistence=text(lambda: _SWITCH[nvml.nvmlDeviceGetPersistenceMode(device)]),
        power_limit=text(lambda: f"{nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000:.2f} W"),
        clocks={
            "sm": text(lambda: f"{nvml.nvmlDeviceGetClockInfo(device, sm)} MHz"),
            "memory": text(lambda: f"{nvml.nvmlDeviceGetClockInfo(device, memory)} MHz"),
            "sm max": text(lambda: f"{nvml.nvmlDeviceGetMaxClockInfo(device, sm)} MHz"),
            "memory max": text(lambda: f"{nvml.nvmlDeviceGetMaxClockInfo(device, memory)} MHz"),
            "sm set": text(lambda: f"{nvml.nvmlDeviceGetClock(device, graphics, application)} MHz"),
        },
        pcie=f"gen {generation} x {width}",
    )


def _topology(nvml: Any, devices: Sequence[Any]) -> str:
    """How each two GPUs are connected, a line for each pair."""

    def path(one: Any, other: Any) -> str:
        nvlink = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        if _reported(lambda: nvml.nvmlDeviceGetP2PStatus(one, other, nvlink)) == pynvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        level = _reported(lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
        return _PATHS.get(level, "N/A")

    pairs = combinations(enumerate(devices), 2)
    return "\n".join(f"GPU{first}-GPU{second}: {path(one, other)}" for (first, one), (second, other) in pairs)
