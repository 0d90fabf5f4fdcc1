"""Another client of the gateway: asks `GET /livez` without pause and notes the longest time without an answer.

`python -m tests.bench.bounds.livez PORT PID`: measures until a line arrives on standard input, then prints a `Gap`.
The machine is shared, so a gap is told together with the CPU time that the gateway's process spent in the worst one:
of what is much longer than that, others are to blame.
"""

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

_PAUSE_SECONDS = 0.001
_REQUEST = b"GET /livez HTTP/1.1\r\nhost: livez\r\n\r\n"
_END = b'"}'
_SETTLE_SECONDS = 0.3


@dataclass(frozen=True)
class Gap:
    """The longest time between two answers, the most CPU that the gateway took between two, and how many came."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    answers: int = 0
    ended: bool = False  # the connection was closed or reset


class LivezClient:
    """Runs in a process of its own; `gap` ends the measurement."""

    def __init__(self, port: int, pid: int) -> None:
        command = [sys.executable, "-m", "tests.bench.bounds.livez", str(port), str(pid)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has begun

    def gap(self) -> Gap:
        """What was measured since the start."""
        time.sleep(_SETTLE_SECONDS)
        told, _ = self._process.communicate(b"\n")
        return Gap(**json.loads(told))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def asking(port: int, pid: int) -> Iterator[LivezClient]:
    """Such a client while the block runs."""
    client = LivezClient(port, pid)
    try:
        yield client
    finally:
        client.end()


def measure(port: int, pid: int) -> Gap:
    """Ask until standard input has a line."""
    clock = (~pid << 3) | 2  # Linux: the CPU clock of that process
    longest = cpu = 0.0
    answers = 0
    ended = False
    with socket.create_connection(("127.0.0.1", port)) as connection:
        print("begun", flush=True)  # noqa: T201
        last, last_cpu, last_pause = time.monotonic(), _cpu_seconds(clock), 0.0
        connection.sendall(_REQUEST)
        while True:
            ready, _, _ = select.select([sys.stdin] if ended else [connection, sys.stdin], [], [])
            now, now_cpu = time.monotonic(), _cpu_seconds(clock)
            if answers or sys.stdin in ready:  # the first answer has nothing before it
                longest = max(longest, now - last - last_pause) if not ended else longest
                cpu = max(cpu, now_cpu - last_cpu)
            if sys.stdin in ready:
                return Gap(longest, cpu, answers, ended)
            with suppress(OSError):
                data = connection.recv(65536)
            ended = not data
            if ended or not data.endswith(_END):
                continue
            answers += 1
            last, last_cpu, last_pause = now, now_cpu, _PAUSE_SECONDS
            time.sleep(_PAUSE_SECONDS)
            with suppress(OSError):
                connection.sendall(_REQUEST)


def _cpu_seconds(clock: int) -> float:
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0  # the process has ended


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1]), int(sys.argv[2])))), flush=True)  # noqa: T201
