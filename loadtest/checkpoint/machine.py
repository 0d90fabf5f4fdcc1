"""The machine, as Linux reports it. What is unknown is left out, not guessed."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from gateway import __version__
from loadtest.checkpoint import redaction
from loadtest.checkpoint.document import Runtime
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
