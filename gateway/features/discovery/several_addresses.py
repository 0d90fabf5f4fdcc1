"""Warns of backends whose name should be a source of discovery."""

import asyncio
import socket
from collections import Counter
from collections.abc import Iterable
from urllib.parse import urlsplit

from gateway.core.backends.settings import BackendConfig


async def several_addresses(backends: Iterable[BackendConfig]) -> list[str]:
    """A warning for each URL whose host has several addresses, which count as one backend."""

    async def addresses(backend: BackendConfig) -> int:
        parts, loop = urlsplit(backend.url), asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        except OSError:
            return 0  # its probes fail, and say why
        families = Counter(family for family, *_ in found)
        return max(families.values(), default=0)

    listed = [*backends]
    counts = await asyncio.gather(*map(addresses, listed))
    return [
        f"{backend.url} has {count} addresses, but counts as one backend, with one cap and one prefix record."
        " Use discovery.dns or discovery.kubernetes, so that each address is a backend."
        for backend, count in zip(listed, counts, strict=True)
        if count > 1
    ]
