"""Child processes that serve HTTP: wait until they do, and never leave them behind."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.servers import processes

READY_SECONDS = 30.0
STOP_SECONDS = 15.0
LOG_TAIL_LINES = 30


def wait_until_serving(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Return once the URL answers 200; fail with the end of the log when the process dies or takes too long."""
    try:
        processes.wait_until_serving(url, process.poll, READY_SECONDS)
    except processes.NotServing as failed:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        raise AssertionError(f"the server of {url} {failed}; its output ends with:\n{tail}") from None


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
