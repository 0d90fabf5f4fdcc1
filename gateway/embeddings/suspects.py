"""Clients whose requests have spoilt a batch: for a while they share batches only with each other.

An address may stand for many clients behind a proxy: if all of them are suspects, they still share batches.
"""

from ipaddress import IPv6Address

_SECONDS = 10.0
_MOST = 1024


class Suspects:
    """Who is kept apart, and until when."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # soonest first

    def __len__(self) -> int:
        return len(self._until)

    def add(self, client: str, now: float) -> None:
        """This client's request was refused after it had spoilt a batch."""
        self._until.pop(client, None)
        if len(self._until) >= _MOST:
            del self._until[next(iter(self._until))]
        self._until[client] = now + _SECONDS

    def holds(self, client: str, now: float) -> bool:
        """Whether this client is kept apart now."""
        while self._until:
            first = next(iter(self._until))
            if self._until[first] > now:
                break
            del self._until[first]
        return client in self._until


def network_of(address: str) -> str:
    """What stands for a client without a name: its address, or the /64 that IPv6 gives to each."""
    if ":" not in address:
        return address
    parsed = IPv6Address(address)
    return str(parsed.ipv4_mapped or parsed.exploded[:19])
