"""The arms of the comparison: the gateway by each of its policies, and every router that is installed."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tests.bench.peers import OURS, PEERS, Peer
from tests.bench.place import Place, Ports

POLICIES = ("prefix", "least_loaded", "round_robin")
TOLD = "told"


@dataclass(frozen=True)
class Arm:
    """One way to route. `peer` is None for the gateway."""

    name: str
    policy: str
    peer: Peer | None = None
    speeds: tuple[float, ...] = ()
    """Of the backends, where the gateway is told that they differ."""

    @property
    def is_ours(self) -> bool:
        """Whether it is the gateway, whose predictions can be read."""
        return self.peer is None

    @property
    def label(self) -> str:
        """What it is called in tables."""
        return self.name if self.peer is not None else f"{OURS}, {self.policy}{' (told)' if self.speeds else ''}"

    def command(self, place: Place, ports: Ports, max_in_flight: int) -> list[str]:
        """What starts it in the foreground; the gateway's configuration is written first."""
        if self.peer is not None:
            return self.peer.command(place, ports)
        file = place.logs / f"{self.name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(self.configuration(ports, max_in_flight)))
        return [sys.executable, "-m", "gateway", "serve", "-c", str(file)]

    def configuration(self, ports: Ports, max_in_flight: int) -> dict[str, Any]:
        """The gateway's: all defaults, but for what an operator has to say."""
        backends: list[dict[str, Any]] = [{"url": url, "max_in_flight": max_in_flight} for url in ports.backends]
        for backend, speed in zip(backends, self.speeds, strict=False):
            backend["speed"] = speed
        return {
            "server": {
                "host": "127.0.0.1",
                "port": ports.proxy,
                "admin": {"host": "127.0.0.1", "port": ports.metrics},
                "drain_delay_seconds": 0,
                "drain_timeout_seconds": 1,
            },
            "backends": backends,
            "routing": {"policy": self.policy},
        }


def ours(policy: str, speeds: tuple[float, ...] = ()) -> Arm:
    """The gateway by one of its policies."""
    return Arm(f"{OURS}-{policy}" + (f"-{TOLD}" if speeds else ""), policy, speeds=speeds)


def arms(place: Place, names: Sequence[str], slow: tuple[float, ...] = ()) -> tuple[list[Arm], list[str]]:
    """The arms of these names, or all; and the routers that are left out because they are not installed.

    With `slow`, the relative times of the engines, there is one more of the gateway that is told of them.
    """
    known = {arm.name: arm for arm in [ours(policy) for policy in POLICIES]}
    if slow:
        known |= {arm.name: arm for arm in [ours("prefix", slow)]}
    known |= {peer.name: Arm(peer.name, peer.policy, peer) for peer in PEERS.values() if peer.is_router}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no arm {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = [known[name] for name in names] if names else list(known.values())
    missing = [arm.name for arm in wanted if arm.peer is not None and arm.peer.program(place) is None]
    return [arm for arm in wanted if arm.name not in missing], missing
