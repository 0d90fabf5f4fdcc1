"""The arms of the comparison: the gateway by each of its policies, and every router that is installed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadtest.compare.peers import OURS
from loadtest.compare.proxy import Peer
from loadtest.servers.engines import EngineOptions
from loadtest.servers.server import Server, gateway_server
from tests.bench.peers import PEERS, setting
from tests.bench.place import Place, Ports

POLICIES = ("prefix", "least_loaded", "round_robin")


@dataclass(frozen=True)
class Arm:
    """One way to route. `peer` is None for the gateway."""

    name: str
    policy: str
    peer: Peer | None = None
    speeds: tuple[float, ...] = ()
    """Of the backends, where the gateway is told that they differ."""
    follows_events: bool = False
    """Whether the gateway knows the engines' blocks by their KV events, or from its own record alone."""

    @property
    def is_ours(self) -> bool:
        """Whether it is the gateway, whose predictions can be read."""
        return self.peer is None

    @property
    def predicts(self) -> bool:
        """Whether its predictions are to be judged."""
        return self.is_ours and self.policy == "prefix"

    @property
    def label(self) -> str:
        """What it is called in tables."""
        if self.peer is not None:
            return self.name
        told = " (told)" if self.speeds else " + KV events" if self.follows_events else ""
        return f"{OURS}, {self.policy}{told}"

    def server(self, place: Place, ports: Ports, engines: EngineOptions) -> Server:
        log = place.logs / f"{self.name}.log"
        if self.peer is not None:
            return self.peer.server(place.peers, replace(setting(place, ports), model=engines.model), log)
        sections = self.sections(ports.backends, engines)
        return gateway_server(sections, log, ports=(ports.proxy, ports.metrics), apart=True)

    def sections(self, backend_urls: Sequence[str], engines: EngineOptions) -> dict[str, Any]:
        """The gateway's configuration: all defaults, but for what an operator has to say."""
        backend = {"max_in_flight": engines.max_num_seqs, "kv_events": "auto" if self.follows_events else "off"}
        backends: list[dict[str, Any]] = [{"url": url, **backend} for url in backend_urls]
        for one, speed in zip(backends, self.speeds, strict=False):
            one["relative_cost"] = speed
        models = {engines.model: {"tokenizer": str(engines.model_dir.absolute())}} if self.follows_events else {}
        server = {"drain_timeout_seconds": 1}
        return {"server": server, "backends": backends, "routing": {"policy": self.policy}, "models": models}


def ours(policy: str, speeds: tuple[float, ...] = ()) -> Arm:
    """The gateway by one of its policies, from its own record."""
    return Arm(f"{OURS}-{policy}" + ("-told" if speeds else ""), policy, speeds=speeds)


def arms(place: Place, names: Sequence[str], engines: EngineOptions) -> tuple[list[Arm], list[str]]:
    """The arms of these names, or all; and the routers that are left out because they are not installed.

    Of unequal engines, one more of the gateway is told; of engines that publish KV events, one more follows them.
    """
    known = [ours(policy) for policy in POLICIES]
    if engines.slow != 1:
        known.append(ours("prefix", engines.speeds))
    if engines.kv_events:
        known.append(Arm(f"{OURS}-events", "prefix", follows_events=True))
    known += [Arm(peer.name, peer.policy, peer) for peer in PEERS.values() if peer.routes_by_prefix]
    by_name = {arm.name: arm for arm in known}
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"no arm {', '.join(unknown)}; there are {', '.join(by_name)}")
    wanted = [by_name[name] for name in names] if names else known
    missing = [arm.name for arm in wanted if arm.peer is not None and arm.peer.find(place.peers) is None]
    return [arm for arm in wanted if arm.name not in missing], missing
