"""Resource limits: open files, one memory budget for bodies, uploads, queue and answers; and resource usage."""

import errno
import os
import resource
import socket
import time
from typing import NamedTuple

import structlog

from gateway.config import Config
from gateway.core.errors import MemoryFull

_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE})
_OWN = 18  # standard streams, listeners, the event loop
_MOST_OPERATORS, _LEAST_OPERATORS = 64, 7  # connections of each port for operators
_RETRY_AFTER_SECONDS = 1.0
_PER_BACKEND = 16  # probes, questions, KV events, idle connections


def raise_limit() -> int:
    """Raise the soft limit of this process to the hard limit. Returns the limit that holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard


def operator_connections(limit: int | None = None) -> int:
    """The most connections of each port for operators. `limit`: of descriptors; None = the limit in force."""
    if limit is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPERATORS if limit == resource.RLIM_INFINITY else limit // 32
    return min(_MOST_OPERATORS, max(_LEAST_OPERATORS, most))


def fitted(config: Config, limit: int) -> Config:
    """The configuration with no more client connections than descriptors allow: each may need another to a backend."""
    wanted = config.server.max_connections
    reserved = _OWN + 2 * operator_connections(limit) + _PER_BACKEND * len(config.backends)
    most = max(1, (limit - reserved) // 2)
    if limit == resource.RLIM_INFINITY or wanted <= most:
        return config
    structlog.get_logger("gateway").warning(
        "max_connections_lowered", max_connections=most, configured=wanted, nofile_limit=limit
    )
    return config.model_copy(update={"server": config.server.model_copy(update={"max_connections": most})})


def are_used_up(error: BaseException | None) -> bool:
    """Whether a connection failed because this process or machine has no descriptor left."""
    if isinstance(error, socket.gaierror):  # the resolver opens files and sockets, and does not say why it failed
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as opening:
            error = opening
    return isinstance(error, OSError) and error.errno in _NONE_LEFT


class MemoryBudget:
    """The bytes that all requests may hold together. `used_bytes` is changed by `Holding` only."""

    __slots__ = ("limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def apply(self, limit_bytes: int) -> None:
        """Take over another limit; held memory stays held."""
        self.limit_bytes = limit_bytes

    def __repr__(self) -> str:
        return f"<MemoryBudget {self.used_bytes} of {self.limit_bytes} bytes>"


class Holding:
    """The bytes that one holder has reserved. A `with` block, or `release`, gives all of them back."""

    __slots__ = ("_budget", "size_bytes")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.size_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Reserve bytes. Raises MemoryFull, and reserves nothing, if they exceed the limit."""
        budget = self._budget
        if budget.used_bytes + size_bytes > budget.limit_bytes:
            raise MemoryFull(
                f"Memory budget exceeded: {budget.used_bytes} of {budget.limit_bytes} bytes are in use, and"
                f" {size_bytes} more are needed. Retry later, or raise server.memory_budget_bytes.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        budget.used_bytes += size_bytes
        self.size_bytes += size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Return a part, at most the held bytes: after `release` this does nothing."""
        if size_bytes > self.size_bytes:
            size_bytes = self.size_bytes
        self._budget.used_bytes -= size_bytes
        self.size_bytes -= size_bytes

    def release(self) -> None:
        self.shrink(self.size_bytes)

    def fit(self, size_bytes: int) -> None:
        """Hold exactly this many bytes. Raises MemoryFull, and changes nothing, if they exceed the limit."""
        if size_bytes > self.size_bytes:
            self.add(size_bytes - self.size_bytes)
        else:
            self.shrink(self.size_bytes - size_bytes)

    def passed_on(self) -> "Holding":
        """A new holder of all these bytes; this one has none then."""
        other = Holding(self._budget)
        other.size_bytes, self.size_bytes = self.size_bytes, 0
        return other

    def __enter__(self) -> "Holding":
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink(self.size_bytes)


class ProcessUse(NamedTuple):
    """The process's CPU time since its start, and its current memory."""

    cpu_seconds: float
    memory_bytes: int


def process_use() -> ProcessUse:
    """Of this process. Where /proc does not exist, the memory is the most that it ever had."""
    try:
        with open("/proc/self/statm", "rb") as file:
            memory_bytes = int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        scale = 1 if os.uname().sysname == "Darwin" else 1024
        memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    return ProcessUse(time.process_time(), memory_bytes)
