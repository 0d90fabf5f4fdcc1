"""A server that a command owns: started, awaited, killed, hung, and stopped with all that it has started.

A guard ends its process group when the owner's process ends in any way, SIGKILL included.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from loadtest.servers.processes import STOP_GRACE_SECONDS, Guard, free_ports, launch, signal_group, stop

HOST = "127.0.0.1"
LOG_LINES = 25
_LINE_CHARS = 400
_LOGGED_ERRORS = 5
_KEPT_BYTES = 65_536
_READY_SECONDS = 30.0
_POLL_SECONDS = 0.1
_GONE_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_DETAIL_CHARS = 200
# An exception's own line in vLLM's log, such as: (EngineCore pid=7) ERROR 11-21 12:00:00 [core.py:9] OSError: no room
_ERROR_LINE = re.compile(r".* ERROR [^\]]*\] \S*(?:Error|Exception|Interrupt)\b")


class ServerFailed(Exception):
    """A server did not start, or has ended by itself: `why`, and its last output in `log`."""

    def __init__(self, why: str, log: Sequence[str] = ()) -> None:
        super().__init__("\n".join([f"{why}; its log ends with:", *log]) if log else why)
        self.why = why
        self.log = list(log)


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of a server, and its check for readiness. `apart`: its output is kept in a file next to its errors."""

    command: Sequence[str]
    url: str
    ready_path: str = "/health"
    _: KW_ONLY
    ready_seconds: float = _READY_SECONDS
    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = "the server"
    core: int | None = None
    stop_seconds: float = STOP_GRACE_SECONDS
    apart: bool = False


class Server:
    """Runs inside its block, or from `start` to `stop`; `start` starts it again at the same address.

    `on_poll` is called with the seconds of waiting; its errors end the wait.
    """

    def __init__(self, how: Launch, log: Path, on_poll: Callable[[float], None] | None = None) -> None:
        self.launch = how
        self.log = log
        self.start_seconds = 0.0
        self._on_poll = on_poll or (lambda _seconds: None)
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return self.launch.url

    @property
    def pid(self) -> int:
        """The process, which leads its process group."""
        return self._started().pid

    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._started().poll()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it; returns immediately. Raises ServerFailed."""
        if self.is_running():
            raise ServerFailed(f"{self.launch.name} is running")
        how = self.launch
        self.log.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.log, self._printed):
            path.write_bytes(b"")
        try:
            with self.log.open("ab") as errors, self._printed.open("ab") as printed:
                self._process = launch(how.command, how.core, printed, error=errors, environment=how.environment)
            self._guard = Guard(self._process.pid)
        except OSError as error:
            if self._process is not None and self._process.poll() is None:
                stop(self._process, grace_seconds=0.0)
            raise ServerFailed(f"cannot start {how.command[0]}: {error.strerror}") from None

    def wait_ready(self) -> None:
        """Return once it serves. Raises ServerFailed, and the errors of `on_poll`."""
        self.wait_until(lambda: serves(self.url + self.launch.ready_path))

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Return once that holds. Raises ServerFailed, and the errors of `on_poll`."""
        try:
            self.start_seconds = wait_until(ready, self.exit_code, self.launch.ready_seconds, self._on_poll)
        except ServerFailed as failed:
            raise self._failed(failed.why) from None

    def check(self) -> None:
        """Raises ServerFailed if it has ended by itself."""
        if (code := self.exit_code()) is not None:
            raise self._failed(f"ended by itself, exit code {code}")

    def terminate(self) -> None:
        """Request a stop, as an orchestrator does; returns immediately."""
        self._started().terminate()

    def stop(self, grace_seconds: float | None = None) -> bool:
        """Terminate it, then kill the rest of its group. Whether the grace was enough; harmless if it is over."""
        if self._process is None or self._guard is None:
            return True
        try:
            return stop(self._process, self.launch.stop_seconds if grace_seconds is None else grace_seconds)
        finally:
            self._end()

    def kill(self) -> None:
        """Kill all of it, as a crash would; returns once it is gone."""
        self._signal(signal.SIGKILL)
        if self._guard is not None:
            self._started().wait()
            self._end()

    def suspend(self) -> None:
        """Let it hang: its connections stay open, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on from where it hung."""
        self._signal(signal.SIGCONT)

    def wait_gone(self) -> None:
        """Wait for all of its group: its memory is free then."""
        deadline = time.monotonic() + _GONE_SECONDS
        while self._is_left() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def log_end(self) -> list[str]:
        """The exceptions in its log, and its last lines; its output if there are no errors."""
        for path in (self.log, self._printed):
            lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
            lines = [line[:_LINE_CHARS] for line in lines if line.strip()]
            if last := lines[-LOG_LINES:]:
                return [line for line in logged_errors(lines) if line not in last] + last
        return []

    def _failed(self, why: str) -> ServerFailed:
        return ServerFailed(f"{self.launch.name} {why}", self.log_end())

    def _signal(self, number: signal.Signals) -> None:
        if self._guard is not None:
            signal_group(self._started(), number)

    def _is_left(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _end(self) -> None:
        # From now on the group's id may be reused.
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        _keep_end(self._printed)

    @property
    def _printed(self) -> Path:
        return self.log.with_suffix(".out") if self.launch.apart else self.log

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed(f"{self.launch.name} has not been started")
        return self._process


def _keep_end(path: Path) -> None:
    """An access log of millions of lines is written for its cost, not to be kept."""
    if path.suffix == ".out" and path.stat().st_size > _KEPT_BYTES:
        with path.open("rb") as file:
            file.seek(-_KEPT_BYTES, os.SEEK_END)
            end = file.read()
        path.write_bytes(end)


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:_LINE_CHARS] if lines else "none"


def logged_errors(log: Sequence[str]) -> list[str]:
    """The exceptions of vLLM's inner processes, without tracebacks; the log's end does not show them."""
    errors = [line for line in log if _ERROR_LINE.match(line)]
    return list(dict.fromkeys(errors))[-_LOGGED_ERRORS:]


def wait_until(
    ready: Callable[[], bool],
    exit_code: Callable[[], int | None],
    deadline_seconds: float,
    on_poll: Callable[[float], None] = lambda _elapsed_seconds: None,
) -> float:
    """Seconds until the server with this exit code serves. Raises ServerFailed, and the errors of ON_POLL."""
    started = time.monotonic()
    while not ready():
        elapsed = time.monotonic() - started
        if (code := exit_code()) is not None:
            raise ServerFailed(f"ended by itself, exit code {code}")
        if elapsed > deadline_seconds:
            raise ServerFailed(f"is not ready after {deadline_seconds:g} s")
        on_poll(elapsed)
        time.sleep(_POLL_SECONDS)
    # Whoever answers may be another, if this one could not have the port.
    if (code := exit_code()) is not None:
        raise ServerFailed(f"ended by itself, exit code {code}")
    return time.monotonic() - started


def open_direct(request: str | urllib.request.Request, timeout_seconds: float) -> Any:
    """The answer, without a proxy. Raises OSError, including HTTPError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return direct.open(request, timeout=timeout_seconds)


def serves(url: str, timeout_seconds: float = 5.0) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with open_direct(url, timeout_seconds) as answer:
            return int(answer.status) == 200
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


def get(url: str, timeout_seconds: float = _ANSWER_SECONDS) -> bytes:
    """The body of a GET. Raises OSError."""
    with open_direct(url, timeout_seconds) as answer:
        body: bytes = answer.read()
    return body


def ask(url: str, body: bytes = b"{}", timeout_seconds: float = _ANSWER_SECONDS) -> bytes:
    """The answer to a POST of JSON, which is JSON too. Raises OSError and ValueError."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with open_direct(request, timeout_seconds) as response:
            answer: bytes = response.read()
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"{error.code}: {error.read()[:_DETAIL_CHARS].decode('utf-8', 'replace')}") from None
    json.loads(answer)
    return answer


def simulated_engine(flags: Sequence[str], log: Path, port: int = 0) -> Server:
    """One `loadtest sim` with these flags, at that port of this machine or at a free one."""
    port = port or free_ports(1)[0]
    url = f"http://{HOST}:{port}"
    command = [sys.executable, "-m", "loadtest", "sim", "--port", str(port), *flags]
    return Server(Launch(command, url, name=f"the simulated engine at {url}"), log)


def gateway_server(
    sections: Mapping[str, Any],
    log: Path,
    *,
    module: str = "gateway",
    flags: Sequence[str] = (),
    ports: Sequence[int] = (),
    ready_path: str = "/readyz",
    **how: Any,
) -> Server:
    """The gateway with that configuration, written beside its log; `ports` are its own and the admin port's."""
    port, admin_port = ports or free_ports(2)
    file = log.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(gateway_configuration(sections, port, admin_port)), encoding="utf-8")
    command = [sys.executable, "-m", module, "serve", "-c", str(file), *flags]
    return Server(Launch(command, f"http://{HOST}:{port}", ready_path, name="the gateway", **how), log)


def gateway_configuration(sections: Mapping[str, Any], port: int, admin_port: int) -> dict[str, Any]:
    """At these ports of this machine; as long as nothing else is said, there is no balancer that is to notice first."""
    server = {"drain_delay_seconds": 0, **sections.get("server", {})}
    admin = {**server.get("admin", {}), "host": HOST, "port": admin_port}
    return {**sections, "server": {**server, "host": HOST, "port": port, "admin": admin}}
