"""A server that the sweep owns: a process group that outlives neither its block nor the sweep."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from loadtest.drive.fleet import Stopped
from loadtest.servers.processes import NotServing, ProcessGroup, wait_until_serving
from loadtest.sweep.plan import SweepPlan
from loadtest.sweep.space import Configuration, spelled
from loadtest.vllm_cpu.process import (
    LOG_TAIL_LINES,
    STOP_GRACE_SECONDS,
    VllmOptions,
    command_line,
    environment,
    logged_errors,
)

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.25
_GATEWAY_READY_SECONDS = 30.0
_GONE_SECONDS = 5.0


class ServerFailed(Exception):
    """A server could not start, or ended by itself; `log` is what it said last."""

    def __init__(self, why: str, log: list[str]) -> None:
        super().__init__(why)
        self.log = log


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started, and how it is known to be ready."""

    command: list[str]
    port: int
    ready_path: str
    ready_seconds: float
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"


def engine(plan: SweepPlan, configuration: Configuration, port: int) -> Launch:
    serve, arguments, ours = plan.serve, configuration.arguments(), dict(os.environ)
    if serve.vllm_cpu is not None:
        own = serve.vllm_cpu
        options = VllmOptions(
            own.model, venv_dir=own.venv, port=port, kv_events=False, kv_cache_gib=own.kv_cache_gib,
            flags=tuple(arguments), environment=serve.env,
        )  # fmt: skip
        return Launch(command_line(options), port, "/health", serve.ready_seconds, environment(options, ours))
    if serve.simulated is not None:
        fixed = [word for flag, value in serve.simulated.items() for word in spelled(flag, value)]
        command = [sys.executable, "-m", "loadtest", "sim", "--port", str(port), *fixed, *arguments]
    else:
        given = serve.command or []
        command = [word.replace("{port}", str(port)) for word in given] + arguments
        if command == given + arguments:
            command += ["--host", _HOST, "--port", str(port)]
    return Launch(command, port, "/health", serve.ready_seconds, ours | serve.env)


def command_text(plan: SweepPlan, configuration: Configuration) -> list[str]:
    """How people start the server of a configuration."""
    serve = plan.serve
    if serve.vllm_cpu is not None:
        first = ["vllm", "serve", str(serve.vllm_cpu.model)]
    elif serve.simulated is not None:
        fixed = [word for flag, value in serve.simulated.items() for word in spelled(flag, value)]
        first = ["loadtest", "sim", "--port", "8000", *fixed]
    else:
        first = [word.replace("{port}", "8000") for word in serve.command or []]
    return first + configuration.arguments()


def gateway(plan: SweepPlan, backend_url: str, port: int) -> Launch:
    command = [sys.executable, "-m", "gateway", "serve", "--backend", backend_url, "--host", _HOST, "--port", str(port)]
    command += ["--admin-port", "0"]
    if plan.gateway_config is not None:
        command += ["--config", str(plan.gateway_config)]
    return Launch(command, port, "/readyz", _GATEWAY_READY_SECONDS, dict(os.environ))


def log_end(path: Path) -> list[str]:
    """The errors in a log and its last lines."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    last = lines[-LOG_TAIL_LINES:]
    return [line for line in logged_errors(lines) if line not in last] + last


class Server:
    """Runs inside the block. A signal that `should_stop` reports ends the wait for it."""

    def __init__(self, launch: Launch, log_path: Path, should_stop: Callable[[], bool]) -> None:
        self.launch = launch
        self.log_path = log_path
        self.start_seconds = 0.0
        self._should_stop = should_stop
        self._group: ProcessGroup | None = None

    def __enter__(self) -> Self:
        try:
            self._group = ProcessGroup(self.launch.command, self.launch.environment, self.log_path)
            self._wait_ready(self._group)
        except OSError as error:
            self._stop()
            raise ServerFailed(f"cannot start {self.launch.command[0]}: {error.strerror}", []) from None
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def check(self) -> None:
        """Raises ServerFailed if it has ended by itself."""
        if self._group is not None and (code := self._group.exit_code()) is not None:
            raise ServerFailed(f"the server ended by itself, exit code {code}", log_end(self.log_path))

    def _wait_ready(self, group: ProcessGroup) -> None:
        launch = self.launch
        try:
            self.start_seconds = wait_until_serving(
                launch.url + launch.ready_path, group.exit_code, launch.ready_seconds, self._heed
            )
        except NotServing as failed:
            raise ServerFailed(f"the server {failed}", log_end(self.log_path)) from None

    def _heed(self, _elapsed_seconds: float) -> None:
        if self._should_stop():
            raise Stopped

    def _stop(self) -> None:
        if self._group is None:
            return
        self._group.stop(STOP_GRACE_SECONDS)
        # The next server needs the memory of all of it.
        deadline = time.monotonic() + _GONE_SECONDS
        while self._group.is_left() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
