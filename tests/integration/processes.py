"""Child processes that serve HTTP: wait until they do, and never leave them behind."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.vllm_cpu.serving import serves

READY_SECONDS = 30.0
_ASK_SECONDS = 2.0
STOP_SECONDS = 15.0
LOG_TAIL_LINES = 30


def wait_until_serving(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Return once the URL answers 200; fail with the end of the log when the process dies or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while not serves(url, _ASK_SECONDS):
        ended = process.poll()
        if ended is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            state = "is not serving in time" if ended is None else f"ended with {ended}"
            raise AssertionError(f"the server of {url} {state}; its output ends with:\n{tail}")
        time.sleep(0.05)


@contextmanager
def stopped_at_exit(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Terminate the process after the block, by force if it takes too long."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
