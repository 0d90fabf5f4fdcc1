"""File descriptors: how many the process may open, and which failures mean that none is left."""

import errno
import os
import resource
import socket

import structlog

from gateway.config import Config

_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE})
_RESERVED = 32  # standard streams, listeners, the event loop, the admin port
_PER_BACKEND = 16  # probes, questions, KV events, idle connections


def raise_limit() -> int:
    """Raise the soft limit of this process to the hard limit. Returns the limit that holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft
    return hard


def fitted(config: Config, limit: int) -> Config:
    """The configuration with no more client connections than this limit allows.

    Each client may need a second descriptor, for the connection to a backend.
    """
    wanted = config.server.max_connections
    most = max(1, (limit - _RESERVED - _PER_BACKEND * len(config.backends)) // 2)
    if limit == resource.RLIM_INFINITY or wanted <= most:
        return config
    structlog.get_logger("gateway").warning(
        "max_connections_lowered", max_connections=most, configured=wanted, nofile_limit=limit
    )
    return config.model_copy(update={"server": config.server.model_copy(update={"max_connections": most})})


def are_used_up(error: BaseException | None) -> bool:
    """Whether a connection failed because this process or machine has no descriptor left."""
    if isinstance(error, socket.gaierror):
        return _none_opens()  # the resolver opens files and sockets, and does not say why it failed
    return isinstance(error, OSError) and error.errno in _NONE_LEFT


def _none_opens() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in _NONE_LEFT
    return False
