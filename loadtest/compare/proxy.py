"""A proxy that can be compared: where its program is, how it is started, and that it answers."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from loadtest.servers.processes import running
from loadtest.workloads.prompts import NO_GROUP, BodyMaker, Endpoint, Prompt

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Setting:
    """What a proxy is started for. It listens on 127.0.0.1."""

    backends: tuple[str, ...]
    """URLs."""
    port: int
    metrics_port: int
    folder: Path
    """For its configuration and whatever else it writes; it is there."""
    model: str = "mock"
    max_num_seqs: int | None = None
    """Sequences that each backend runs at once, where that is known."""

    @property
    def url(self) -> str:
        """Where the proxy is to serve."""
        return f"http://127.0.0.1:{self.port}"

    def write(self, name: str, text: str) -> str:
        """Keeps a configuration file; returns its path."""
        path = self.folder.resolve() / name
        path.write_text(text, encoding="utf-8")
        return str(path)


def _no_environment(setting: Setting) -> dict[str, str]:  # noqa: ARG001
    return {}


@dataclass(frozen=True)
class Peer:
    """One proxy. `find` looks in the folder of virtual environments, or elsewhere."""

    name: str
    policy: str
    """Its best one for the job, in words."""
    find: Callable[[Path], Path | None]
    arguments: Callable[[Setting], list[str]]
    package: str = ""
    """Of Python, with the version that is compared."""
    debian: str = ""
    environment: Callable[[Setting], dict[str, str]] = _no_environment
    source: str = ""
    """The public repository, where no package index has it: it is installed from a checkout."""
    python: tuple[int, int] = (3, 11)
    """The oldest Python that it runs on."""
    routes_by_prefix: bool = False

    def command(self, peers_dir: Path, setting: Setting) -> list[str]:
        """What starts it in the foreground; writes its configuration. Raises FileNotFoundError."""
        program = self.find(peers_dir)
        if program is None:
            raise FileNotFoundError(f"{self.name} is not installed")
        return [str(program), *self.arguments(setting)]


def in_venv(name: str, program: str) -> Callable[[Path], Path | None]:
    """Finds a program of the peer's own virtual environment."""

    def find(peers_dir: Path) -> Path | None:
        # Not resolved: a virtual environment is known by the path of its python.
        path = peers_dir.absolute() / name / "bin" / program
        return path if path.exists() else None

    return find


def in_venv_or_on_path(name: str, program: str) -> Callable[[Path], Path | None]:
    """Finds a program of the peer's own virtual environment, or one that the user can call."""
    in_own_venv = in_venv(name, program)

    def find(peers_dir: Path) -> Path | None:
        return in_own_venv(peers_dir) or _which(program, None)

    return find


def of_the_system(program: str) -> Callable[[Path], Path | None]:
    """Finds a program where the system keeps its servers."""

    def find(peers_dir: Path) -> Path | None:  # noqa: ARG001
        return _which(program, _SYSTEM_PATH)

    return find


def _which(program: str, path: str | None) -> Path | None:
    found = shutil.which(program, path=path)
    return Path(found) if found else None


READY_SECONDS = 90.0
_ANSWERS = 6
_POLL_SECONDS = 0.2
_REQUEST_SECONDS = 30.0
_LOG_LINES = 8
_DETAIL_CHARS = 200


class ProxyFailed(Exception):
    """It did not start, or ended; `log` is what it said last."""

    def __init__(self, why: str, log: list[str]) -> None:
        super().__init__(why)
        self.log = log


@dataclass(frozen=True, slots=True)
class Proxy:
    """One that runs."""

    url: str
    pid: int
    ended: Callable[[], int | None]
    """Its exit code; None while it runs."""
    log: Path

    def check(self) -> None:
        """Raises ProxyFailed if it has ended."""
        if (code := self.ended()) is not None:
            raise ProxyFailed(f"it ended by itself with {code}", log_end(self.log))


@contextmanager
def started(peer: Peer, peers_dir: Path, setting: Setting, log: Path, endpoint: Endpoint) -> Iterator[Proxy]:
    """The proxy from its first good answers on, stopped with all its processes. Raises ProxyFailed."""
    command = peer.command(peers_dir, setting)
    with running(command, None, log, peer.environment(setting)) as process:
        proxy = Proxy(setting.url, process.pid, process.poll, log)
        _wait_ready(proxy, endpoint, setting.model)
        yield proxy


def _wait_ready(proxy: Proxy, endpoint: Endpoint, model: str) -> None:
    """Until it gave some good answers in a row, so that it knows of more than one backend."""
    deadline = time.monotonic() + READY_SECONDS
    body = BodyMaker(endpoint, model, stream=False).body(Prompt(NO_GROUP, "", "ready?", 1))
    good, last = 0, "none"
    while good < _ANSWERS:
        proxy.check()
        if time.monotonic() > deadline:
            raise ProxyFailed(f"no good answer in {READY_SECONDS:g} s; the last: {last}", log_end(proxy.log))
        try:
            ask(proxy.url + endpoint.path, body)
            good += 1
        except (OSError, ValueError) as error:
            good, last = 0, str(error)
            time.sleep(_POLL_SECONDS)


def ask(url: str, body: bytes) -> bytes:
    """The answer to a POST of JSON, which is JSON too. Raises OSError and ValueError."""
    request = Request(url, body, {"Content-Type": "application/json"})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_REQUEST_SECONDS) as response:
            answer: bytes = response.read()
    except HTTPError as error:
        with error:
            raise OSError(f"{error.code}: {error.read()[:_DETAIL_CHARS].decode('utf-8', 'replace')}") from None
    json.loads(answer)
    return answer


def log_end(log: Path) -> list[str]:
    """The last lines that a proxy printed, as errors or else."""
    for path in (log, log.with_suffix(".out")):
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        if tail := [line[:400] for line in lines if line.strip()][-_LOG_LINES:]:
            return tail
    return []
