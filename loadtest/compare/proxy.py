"""A proxy that runs for the length of a block, and answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from loadtest.compare.peer import Peer, Setting
from loadtest.servers.procs import running
from loadtest.workloads.body import BodyMaker, Endpoint
from loadtest.workloads.prompts import NO_GROUP, Prompt

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
        if told := [line[:400] for line in lines if line.strip()][-_LOG_LINES:]:
            return told
    return []
