"""What the machine is: figures mean nothing without it."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from tests.bench.build import Interpreter, interpreter
from tests.bench.results import Machine


def cpu_model(cpuinfo: str) -> str:
    """The processor's name in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "Hardware"):
            return value.strip()
    return platform.machine()


def describe(python: Interpreter | None = None) -> Machine:
    """This machine, with the Python that the gateway ran on: this one if none is given."""
    python = python or interpreter()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=cpu_model(Path("/proc/cpuinfo").read_text()),
        cores=os.cpu_count() or 1,
        memory_gib=round(pages / 2**30),
        kernel=platform.release(),
        python=str(python),
        quotable=python.optimised,
        date=datetime.now(UTC).date().isoformat(),
    )
