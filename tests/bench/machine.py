"""What the machine is: figures mean nothing without it."""

import os
import platform
import sysconfig
from datetime import UTC, datetime
from pathlib import Path

from tests.bench.results import Machine


def cpu_model(cpuinfo: str) -> str:
    """The processor's name in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "Hardware"):
            return value.strip()
    return platform.machine()


def python_build() -> str:
    """The interpreter and how it was built: a plain build is some 20 % slower than a distribution's."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    known = ("--enable-optimizations", "--with-lto", "--enable-shared")
    flags = " ".join(flag for flag in known if flag in arguments)
    name = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{name}, configured with {flags}" if flags else name


def describe() -> Machine:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=cpu_model(Path("/proc/cpuinfo").read_text()),
        cores=os.cpu_count() or 1,
        memory_gib=round(pages / 2**30),
        kernel=platform.release(),
        python=python_build(),
        date=datetime.now(UTC).date().isoformat(),
    )
