"""Where the benchmark keeps its files, and which ports and cores it uses."""

import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Place:
    """The folder of everything that is built, installed or written."""

    root: Path

    @property
    def engine(self) -> Path:
        """The compiled mock of vLLM servers."""
        return self.root / "bin" / "engine"

    @property
    def lock(self) -> Path:
        """Held while a comparison runs: two at once would measure each other."""
        return self.root / "lock"

    @property
    def load(self) -> Path:
        return self.root / "bin" / "load"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def bodies(self, size: str) -> Path:
        """The request bodies of about SIZE, one a line."""
        return self.root / "bodies" / f"{size}.jsonl"

    @property
    def peers(self) -> Path:
        """The virtual environments of the peers."""
        return self.root / "peers"


@dataclass(frozen=True)
class Ports:
    """Who listens where on 127.0.0.1."""

    proxy: int
    metrics: int
    engines: tuple[int, ...]

    @property
    def backends(self) -> list[str]:
        """The URLs of the mock engines."""
        return [f"http://127.0.0.1:{port}" for port in self.engines]


@dataclass(frozen=True)
class Cores:
    """One for the proxy alone, one for engines and load generator, and where the harness itself runs."""

    proxy: int
    load: int
    harness: int


def choose_cores(allowed: Collection[int], siblings: Callable[[int], Collection[int]]) -> Cores:
    """The proxy gets the first core; the load one that is no hardware thread of it, if possible. Raises ValueError."""
    ordered = sorted(allowed)
    if len(ordered) < 2:
        raise ValueError("the benchmark needs two cores: one for the proxy, one for engines and load")
    proxy = ordered[0]
    apart = [core for core in ordered[1:] if core not in siblings(proxy)]
    load = apart[0] if apart else ordered[1]
    idle = [core for core in ordered if core not in {proxy, load, *siblings(proxy), *siblings(load)}]
    return Cores(proxy, load, idle[0] if idle else load)


def hardware_siblings(core: int) -> set[int]:
    """The hardware threads of a core, itself among them; only itself where the kernel does not say."""
    listing = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        text = listing.read_text().strip()
    except OSError:
        return {core}
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def is_free(port: int) -> bool:
    """Whether nothing listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def choose_ports(engines: tuple[int, ...] | None = None, free: Callable[[int], bool] = is_free) -> Ports:
    """The usual ports, or the next free ones; all below the range from which outgoing connections take theirs.

    ENGINES that run already keep theirs.
    """

    def next_free(start: int) -> int:
        return next(port for port in range(start, start + 500) if free(port))

    if engines is None:
        first = next_free(9200)
        engines = first, next_free(first + 1)
    return Ports(next_free(8100), next_free(8700), engines)
