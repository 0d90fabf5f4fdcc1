"""A proxy that can be compared: where its program is, how it is started, and that it answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from loadtest.servers.server import HOST, Launch, Server, ServerFailed, ask
from loadtest.workloads.prompts import NO_GROUP, BodyMaker, Endpoint, Prompt

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Setting:
    """What a proxy is started for. It listens on 127.0.0.1."""

    backends: tuple[str, ...]
    """URLs."""
    port: int
    _: KW_ONLY
    metrics_port: int
    folder: Path
    """For its configuration and whatever else it writes; it is there."""
    model: str = "mock"
    max_num_seqs: int | None = None
    """Sequences that each backend runs at once, where that is known."""

    @property
    def url(self) -> str:
        """Where the proxy is to serve."""
        return f"http://{HOST}:{self.port}"

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
    _: KW_ONLY
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

    def server(self, peers_dir: Path, setting: Setting, log: Path, core: int | None = None) -> Server:
        """It, not started yet; what it prints is kept beside its errors. Raises FileNotFoundError."""
        command, environment = self.command(peers_dir, setting), self.environment(setting)
        return Server(
            Launch(
                command,
                setting.url,
                "",
                ready_seconds=READY_SECONDS,
                environment=environment,
                name="it",
                core=core,
                apart=True,
            ),
            log,
        )


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


@contextmanager
def started(
    peer: Peer, peers_dir: Path, setting: Setting, log: Path, endpoint: Endpoint, core: int | None = None
) -> Iterator[Server]:
    """The proxy from its first good answers on, stopped with all its processes. Raises ServerFailed.

    It gives several good answers in a row first, so that it knows of more than one backend.
    """
    body = BodyMaker(endpoint, setting.model, stream=False).body(
        Prompt(NO_GROUP, prefix="", tail="ready?", max_tokens=1)
    )
    last = "none"

    def answers_well() -> bool:
        nonlocal last
        try:
            for _ in range(_ANSWERS):
                ask(setting.url + endpoint.path, body)
        except (OSError, ValueError) as error:
            last = str(error)
            return False
        return True

    server = peer.server(peers_dir, setting, log, core)
    try:
        server.start()
        try:
            server.wait_until(answers_well)
        except ServerFailed as failed:
            if not server.is_running():
                raise
            raise ServerFailed(f"{failed.why}; the last answer: {last}", failed.log) from None
        yield server
    finally:
        server.stop()
