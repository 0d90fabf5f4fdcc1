"""Which arms there are: what is installed, and how the rest is had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.compare.installing import how, version
from loadtest.compare.peer import Peer
from loadtest.compare.schema import DIRECT, ArmTold


def told_of(peer: Peer, peers_dir: Path) -> ArmTold:
    """Its version, or how to have it."""
    if peer.find(peers_dir) is None:
        return ArmTold(name=peer.name, policy=peer.policy, version="", missing=f"not installed: {how(peer)}")
    return ArmTold(name=peer.name, policy=peer.policy, version=version(peers_dir, peer))


def arms_of(names: Sequence[str], known: dict[str, Peer], peers_dir: Path, engines: int) -> list[ArmTold]:
    """The arms of these names, or all; an engine without a proxy only where there is one engine. Raises ValueError."""
    if unknown := [name for name in names if name not in known and name != DIRECT]:
        raise ValueError(f"no proxy {', '.join(unknown)}; there are {', '.join((DIRECT, *known))}")
    wanted = list(dict.fromkeys(names)) or [DIRECT, *known]
    told = {name: told_of(known[name], peers_dir) for name in wanted if name != DIRECT}
    alone = ArmTold(name=DIRECT, policy="one engine", version="", missing="" if engines == 1 else _NOT_ALONE)
    # Nobody who did not ask is told that several engines have no way to be reached as one.
    listed = [name for name in wanted if name != DIRECT or names or engines == 1]
    return [alone if name == DIRECT else told[name] for name in listed]


_NOT_ALONE = "several engines are reached through a proxy only; the added latency is against the engines alone"
