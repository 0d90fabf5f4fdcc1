"""The place of a worker: its parent's parameters at its start, and its deviations from the file's settings."""

import os
import socket
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from gateway.config import Config, ServerConfig
from gateway.core.listeners import Listeners, ports_of
from gateway.features.coordination.settings import CoordinationConfig
from gateway.features.workers import WORKER

STORE: Final = "store"  # the socket in the parent's folder for the store of all workers
BATCHES: Final = "batches"  # the socket of the worker that keeps files and batches for all


class WorkerPlace(NamedTuple):
    """`line`: the descriptor of the socket to the parent, which closes when the parent ends; `main`: the descriptors of
    the clients' sockets, which all workers have; `keeps_batches`: the first worker does, for all."""

    number: int
    workers: int
    folder: str
    line: int
    main: tuple[int, ...]
    keeps_batches: bool = False

    @classmethod
    def taken(cls, environment: MutableMapping[str, str]) -> Self | None:
        """The place of this process, if it is a worker. The variable is removed: it is not for its children."""
        given = environment.pop(WORKER, "")
        return msgspec.convert(msgspec.json.decode(given), cls) if given else None

    def given(self) -> dict[str, str]:
        return {WORKER: msgspec.json.encode(self).decode()}

    def applied(self, config: Config) -> Config:
        """The configuration of this worker: it meets the others in the parent's store, unless they meet in Redis, and
        has its own folder for learned state. One worker keeps batches that no database shares."""
        changed: dict[str, object] = {}
        if not config.coordination.url:
            url, name = f"unix://{self.folder}/{STORE}", config.coordination.name
            changed["coordination"] = CoordinationConfig(url=url, name=name, expected_replicas=self.workers)
        if self.number and config.state.path is not None:
            path = str(Path(config.state.path) / f"worker-{self.number}")
            changed["state"] = config.state.model_copy(update={"path": path})
        if self.number and keeps_batches(config):
            changed["batches"] = config.batches.model_copy(update={"path": None})
        return config.model_copy(update=changed)

    @property
    def name(self) -> Path:
        """Of this worker, for the process that takes over its place."""
        return Path(self.folder) / f"worker-{self.number}"

    def close(self) -> None:
        """Close the sockets of the clients' port: this process has them from its predecessor."""
        for number in self.main:
            os.close(number)

    def listeners(self, server: ServerConfig) -> Listeners:
        """The sockets of the clients' port, and those at which the parent finds this worker's other ports."""
        main = [socket.socket(fileno=number) for number in self.main]
        for each in main:
            each.set_inheritable(False)
        found = Listeners(main, [], [])
        for name in ports_of(server).keys() - {"main"}:
            getattr(found, name).append(_bound(socket_path(self.folder, name, self.number)))
        if self.keeps_batches and not self.number:
            found.main.append(_bound(socket_path(self.folder, BATCHES, 0)))
        return found

    @property
    def batches_elsewhere(self) -> str:
        """The path of the socket of the worker that keeps files and batches; empty = this one, or none does."""
        return socket_path(self.folder, BATCHES, 0) if self.keeps_batches and self.number else ""


def keeps_batches(config: Config) -> bool:
    """Whether one worker keeps files and batches for all: no database shares them."""
    return config.batches.path is not None and config.batches.database is None


def _bound(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)  # of the process that had this place before
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(path)
    return bound


def socket_path(folder: str, port: str, number: int) -> str:
    """Where others find a port (`admin`, `metrics` or `batches`) of this worker."""
    return os.path.join(folder, f"{port}-{number}")
