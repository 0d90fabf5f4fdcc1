"""Which `Host` headers the admin port accepts.

A page in an operator's browser may give its own name the address of this port (DNS rebinding), and then read what the
port answers: the browser takes both for one origin. The header tells: it has the page's name. Addresses and loopback
names cannot be taken over like that.
"""

from collections.abc import Collection
from ipaddress import ip_address


def is_own_host(header: str, names: Collection[str]) -> bool:
    """Whether a header is an IP address, a loopback name, or one of these names, with any port."""
    host = _without_port(header.strip().lower()).removesuffix(".")
    if host == "localhost" or host.endswith(".localhost") or host in names:
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.partition(":")
    return name if not colon or port.isdigit() or not port else host
