"""All proxies that are known, in the order of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.compare.litellm import LITELLM
from loadtest.compare.ours import ours
from loadtest.compare.peer import Peer
from loadtest.compare.plain_proxies import HAPROXY, NGINX
from loadtest.compare.routers import PRODUCTION_STACK, SGLANG_ROUTER, SMG, VLLM_ROUTER

PEERS_DIR = Path(".bench/peers")
PEERS: dict[str, Peer] = {
    peer.name: peer for peer in (ours(), SGLANG_ROUTER, VLLM_ROUTER, SMG, PRODUCTION_STACK, LITELLM, NGINX, HAPROXY)
}


def named(names: Sequence[str], known: dict[str, Peer] = PEERS) -> list[Peer]:
    """The proxies of these names, or all. Raises ValueError."""
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no proxy {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())
