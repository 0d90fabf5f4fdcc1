"""Where KV events are published and replayed: vLLM's rules on endpoints, ports and data-parallel ranks."""

from dataclasses import dataclass, replace
from typing import Any

import zmq

_ANY_PORT = "tcp://*:0"


@dataclass(frozen=True, slots=True)
class Address:
    """One socket's address: as it is told, and as it is bound or connected to."""

    told: str
    target: str
    binds: bool

    def attach(self, socket: "zmq.Socket[Any]") -> "Address":
        """Bind or connect; the address with the port that the system chose, if it was to choose one."""
        if not self.binds:
            socket.connect(self.target)
            return self
        if "::" in self.target:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(self.target)
        if self.told != _ANY_PORT:
            return self
        chosen: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return replace(self, told=chosen, target=chosen)


def publish_address(endpoint: str, rank: int, host: str) -> Address:
    """Where a rank publishes: it binds wildcards, and connects to anything else."""
    address = replay_address(endpoint, rank, host)
    local = endpoint.startswith(("ipc://", "inproc://"))
    return replace(address, binds="*" in endpoint or "::" in endpoint or local)


def replay_address(endpoint: str, rank: int, host: str) -> Address:
    """Where a rank replays: it always binds."""
    told = of_rank(endpoint, rank)
    return Address(told, f"tcp://{host}:0" if told == _ANY_PORT else told, binds=True)


def of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: its number is added to the port, unless the system chooses that."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    if not endpoint.startswith("tcp://"):
        raise ValueError(f"data-parallel ranks need a tcp or inproc endpoint, not {endpoint}")
    before, _, port = endpoint.rpartition(":")
    return endpoint if int(port) == 0 else f"{before}:{int(port) + rank}"
