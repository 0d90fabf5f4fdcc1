"""Warnings of `gateway serve` before it serves, and reasons to refuse."""

import errno
import os
import re
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.config import Config


def is_open_to_all(config: "Config") -> bool:
    """Whether clients on other machines can use the models without an API key."""
    try:
        stays_here = ip_address(config.server.host).is_loopback
    except ValueError:
        stays_here = config.server.host == "localhost"
    return config.auth.is_open and not stays_here


def why_not_serving(error: OSError, config: "Config") -> str:
    """The reason of an error for people, with the keys and the options to change."""
    server, options = config.server, {"server": " (--port N)", "server.admin": " (--admin-port N)"}
    found = {"server": server, "server.admin": server.admin, "server.metrics": server.metrics}
    ports = {key: port for key, port in found.items() if port is not None}
    if isinstance(error, socket.gaierror):
        hosts = " and ".join(f"{key}.host ({port.host})" for key, port in ports.items())
        return f"cannot serve: {error.strerror}: check {hosts}"
    tried = re.search(r"bind on address \('([^']*)', (\d+)", str(error))
    if error.errno is None or tried is None:
        return f"cannot serve: {error.strerror or error}"
    address, number = tried[1], int(tried[2])
    keys = [key for key, port in ports.items() if port.port == number]
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        ways = [f"{key}.port{options.get(key, '')}" for key in keys]
    else:
        ways = [f"{key}.host{' (--host ADDRESS)' if key == 'server' else ''}" for key in keys]
    return f"cannot listen on {address} port {number}: {os.strerror(error.errno)}: change {' or '.join(ways)}"
