"""The machine and its GPUs, as Linux and NVML report them. What is unknown is left out, not guessed."""

from __future__ import annotations

import os
import platform
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

from gateway import __version__
from loadtest.checkpoint import redaction
from loadtest.checkpoint.document import Gpu, Hardware, Runtime
from loadtest.gpus import ANSWER_SECONDS, MIB, NONE_LISTED, SILENT, devices_of, memory_of, pynvml, reported
from loadtest.report.schema import Environment

_UNLIMITED = "unlimited"
# The unified hierarchy's names first, then the old ones.
_CGROUP_FILES = {
    "cpu.max": ("cpu.max",),
    "cpuset.cpus": ("cpuset.cpus.effective",),
    "memory.max": ("memory.max",),
    "pids.max": ("pids.max",),
}
_CGROUP_V1_FILES = {
    "cpu.cfs_quota_us": ("cpu", "cpu.cfs_quota_us"),
    "cpu.cfs_period_us": ("cpu", "cpu.cfs_period_us"),
    "cpuset.cpus": ("cpuset", "cpuset.effective_cpus"),
    "memory.limit_in_bytes": ("memory", "memory.limit_in_bytes"),
    "pids.max": ("pids", "pids.max"),
}
_ULIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "stack": resource.RLIMIT_STACK,
    "address space": resource.RLIMIT_AS,
    "core": resource.RLIMIT_CORE,
}


def runtime(root: Path = Path("/")) -> Runtime:
    """From the files below `root`, and this process's own limits."""
    cpu = _cpuinfo(_read(root / "proc/cpuinfo"))
    return Runtime(
        os=_os_name(_read(root / "etc/os-release")),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        container=_container(root),
        cgroup=_cgroup(root),
        python=f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        cpu_model=str(cpu.get("model", platform.processor())),
        cpus=os.cpu_count() or 0,
        cpus_usable=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        cpu_cores=cpu.get("cores"),
        cpu_flags=str(cpu.get("flags", "")),
        numa_nodes=_numa(root / "sys/devices/system/node"),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        ulimits={name: "/".join(map(_limit, resource.getrlimit(number))) for name, number in _ULIMITS.items()},
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _limit(value: int) -> str:
    return _UNLIMITED if value == resource.RLIM_INFINITY else str(value)


def _os_name(release: str) -> str:
    fields = dict(line.split("=", 1) for line in release.splitlines() if "=" in line)
    return fields.get("PRETTY_NAME", platform.system()).strip('"')


def _cpuinfo(text: str) -> dict[str, object]:
    """Model, flags, and cores without hyper-threads."""
    found: dict[str, object] = {}
    cores: set[tuple[str, str]] = set()
    for block in text.split("\n\n"):
        fields = {
            name.strip(): value.strip() for name, _, value in (line.partition(":") for line in block.splitlines())
        }
        if "core id" in fields:
            cores.add((fields.get("physical id", "0"), fields["core id"]))
        found.setdefault("model", fields.get("model name") or fields.get("Processor") or fields.get("CPU part"))
        found.setdefault("flags", " ".join(sorted((fields.get("flags") or fields.get("Features") or "").split())))
    return {name: value for name, value in found.items() if value} | ({"cores": len(cores)} if cores else {})


def _container(root: Path) -> str | None:
    if (root / ".dockerenv").exists():
        return "/.dockerenv is there"
    if (root / "run/.containerenv").exists():
        return "/run/.containerenv is there"
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "KUBERNETES_SERVICE_HOST is set"
    group = _read(root / "proc/1/cgroup")
    kinds = [kind for kind in ("kubepods", "docker", "containerd", "libpod", "lxc") if kind in group]
    return f"the first process is in a group of {kinds[0]}" if kinds else None


def _cgroup(root: Path) -> dict[str, str]:
    """Of this process's own group where it is known, else of the hierarchy's root, as a container sees it."""
    top = root / "sys/fs/cgroup"
    groups = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    own = {name: path.lstrip("/") for _, names, path in groups for name in names.split(",")}
    found: dict[str, str] = {}
    for name, (file,) in _CGROUP_FILES.items():
        if value := _first(top / own.get("", "") / file, top / file):
            found[name] = value
    for name, (controller, file) in _CGROUP_V1_FILES.items():
        if value := _first(top / controller / own.get(controller, "") / file, top / controller / file):
            found.setdefault(name, value)
    return found


def _first(*paths: Path) -> str:
    return next((text for path in paths if (text := _read(path).strip())), "")


def _numa(folder: Path) -> dict[str, str]:
    return {path.name: _read(path / "cpulist").strip() for path in sorted(folder.glob("node[0-9]*"))}


def environment(command: Sequence[str], started_at: datetime, server: dict[str, str]) -> Environment:
    """The environment of a run that starts now."""
    return Environment(
        versions={
            "loadtest": __version__,
            "python": platform.python_version(),
            **{package: version(package) for package in ("aiohttp", "uvloop")},
        },
        command=redaction.command(command),
        started_at=started_at.isoformat(timespec="seconds"),
        host=_host(),
        server=server,
    )


def _host() -> dict[str, str | int]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


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


def hardware(nvml: Any = pynvml) -> Hardware:
    """What the GPUs are and how they are set; says so where there is none, or the driver does not answer."""
    found: list[Hardware] = []
    # A driver that hangs never lets go of the thread; the command goes on without it.
    asking = threading.Thread(target=lambda: found.append(_hardware(nvml)), name="hardware", daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    return found[0] if found else Hardware(no_gpu=f"no GPU: {SILENT}")


def _hardware(nvml: Any) -> Hardware:
    try:
        with devices_of(nvml) as devices:
            if not devices:
                return Hardware(no_gpu=f"no GPU: {NONE_LISTED}")
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


def _gpu(nvml: Any, device: Any) -> Gpu:
    def text(read: Callable[[], object]) -> str:
        value = reported(read)
        return "N/A" if value is None else str(value)

    generation = text(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(device))
    width = text(lambda: f"{nvml.nvmlDeviceGetCurrPcieLinkWidth(device)}x")
    sm, memory, graphics = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM, pynvml.NVML_CLOCK_GRAPHICS
    application = pynvml.NVML_CLOCK_ID_APP_CLOCK_TARGET
    return Gpu(
        name=text(lambda: nvml.nvmlDeviceGetName(device)),
        uuid=text(lambda: nvml.nvmlDeviceGetUUID(device)),
        memory=text(lambda: f"{memory_of(nvml, device).total // MIB} MiB"),
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
        if reported(lambda: nvml.nvmlDeviceGetP2PStatus(one, other, nvlink)) == pynvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        level = reported(lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
        return _PATHS.get(level, "N/A")

    pairs = combinations(enumerate(devices), 2)
    return "\n".join(f"GPU{first}-GPU{second}: {path(one, other)}" for (first, one), (second, other) in pairs)
