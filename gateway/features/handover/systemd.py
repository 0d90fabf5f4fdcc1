"""systemd: the sockets that it passes, as in sd_listen_fds(3), and notifications, as in sd_notify(3)."""

import os
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from gateway.core.listeners import Listeners

_FIRST_FILE = 3


def of_systemd(environment: MutableMapping[str, str]) -> Listeners:
    """The sockets that systemd passed to this process. The variables are removed: they are not for its children."""
    process, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    found = Listeners([], [], [])
    if process != str(os.getpid()) or not count.isdigit():
        return found
    for number in range(int(count)):
        each = socket.socket(fileno=_FIRST_FILE + number)
        os.set_inheritable(each.fileno(), False)
        name = names[number] if number < len(names) else ""
        {"admin": found.admin, "metrics": found.metrics}.get(name, found.main).append(each)
    return found


def notify_systemd(environment: Mapping[str, str], state: str) -> None:
    """Report a state to systemd, if it started this process: `READY=1`, `STOPPING=1`, `MAINPID=N`."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.connect("\0" + address[1:] if address.startswith("@") else address)
        manager.send(state.encode())
