"""What this machine's GPUs do during a run, as nvidia-smi tells it twice a second."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from loadtest.report.schema import GpuSeries

_INTERVAL_MS = 500
_FIELDS = "index,name,driver_version,utilization.gpu,memory.used,memory.total,power.draw"
_END_SECONDS = 5.0


class GpuSampler:
    """Runs nvidia-smi inside the block. `missing` says why there is nothing, or no more, to tell."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._odd_line = ""
        self._gpus: dict[str, GpuSeries] = {}
        self.missing: str | None = None

    def __enter__(self) -> Self:
        program = shutil.which("nvidia-smi")
        if program is None:
            self.missing = "no GPU: nvidia-smi is not installed here"
            return self
        try:
            self._start(program)
        except OSError as error:
            self.missing = f"no GPU: nvidia-smi cannot be run: {error.strerror}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._reader is None:
            return
        ended_by_itself = self._process.poll()
        self._stop(self._process)
        self._reader.join(_END_SECONDS)
        if not self._gpus:
            self.missing = f"no GPU: nvidia-smi says {self._odd_line or 'nothing'}"
        elif ended_by_itself is not None:
            said = f": {self._odd_line}" if self._odd_line else ""
            self.missing = f"nvidia-smi ended during the run, exit code {ended_by_itself}{said}"

    def series(self, origin: float) -> list[GpuSeries]:
        """One for each GPU; call it after the block. Times count from `origin`."""
        return [
            gpu.model_copy(update={"at": [round(moment - origin, 3) for moment in gpu.at]})
            for _, gpu in sorted(self._gpus.items(), key=lambda item: int(item[0]))
        ]

    def _start(self, program: str) -> None:
        # To a terminal it writes line by line; into a pipe it would hold back what it has.
        ours, theirs = pty.openpty()
        command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", f"--loop-ms={_INTERVAL_MS}"]
        try:
            # In a process group of its own: Ctrl-C is for the run, which ends it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, process_group=0
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            # A driver that hangs holds even a killed process; the run does not wait for it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)

    def _read(self, terminal: int) -> None:
        with os.fdopen(terminal, "rb") as lines:
            try:
                for line in lines:
                    self._take(line.decode("utf-8", "replace").strip())
            except OSError:
                return  # how a terminal tells that its other end is closed

    def _take(self, line: str) -> None:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS.split(",")) or not cells[0].isdecimal():
            self._odd_line = self._odd_line or line
            return
        index, name, driver, busy, used, total, power = cells
        gpu = self._gpus.setdefault(
            index, GpuSeries(name=f"{index} {name}", driver=driver, memory_total_mib=_number(total))
        )
        gpu.at.append(self._clock())
        gpu.utilization_percent.append(_number(busy))
        gpu.memory_used_mib.append(_number(used))
        gpu.power_watts.append(_number(power))


def _number(text: str) -> float | None:
    """None for what a GPU does not tell, such as [N/A]."""
    try:
        return float(text)
    except ValueError:
        return None
