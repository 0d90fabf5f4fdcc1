"""Records what a run was made with, so that it can be read and repeated later."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from gateway import __version__
from loadtest.checkpoint import redaction
from loadtest.report.schema import Environment


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
