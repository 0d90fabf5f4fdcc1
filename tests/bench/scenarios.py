"""What is asked of every proxy."""

from dataclasses import dataclass

from tests.bench.place import Place


@dataclass(frozen=True)
class Scenario:
    """One load: closed loop, every connection waits for its answer."""

    name: str
    title: str
    body: str
    connections: int
    seconds: float
    warmup_seconds: float
    events: int = 0
    """Of a stream; 0 = one answer, not streamed."""
    pace_ms: int = 0
    """Between the events of a stream; 0 = as fast as they are taken."""
    refused_pause_ms: int = 0
    """For which a client rests that was refused; 0 = a refusal is an error."""
    scrapes: bool = False
    """Whether the proxy's metrics are read twice a second meanwhile."""

    @property
    def streams(self) -> bool:
        return self.events > 0

    @property
    def paced_events_per_s(self) -> float | None:
        """The rate the engines aim at, if they pace."""
        return self.connections * 1000 / self.pace_ms if self.pace_ms else None

    @property
    def deadline_seconds(self) -> float:
        """When a load generator that is not back is stuck."""
        return self.warmup_seconds + self.seconds + self.events * self.pace_ms / 1000 + 20

    def arguments(self, place: Place, port: int) -> list[str]:
        command = [str(place.load), "--port", str(port), "--bodies", str(place.bodies(self.body))]
        command += ["--connections", str(self.connections), "--seconds", str(self.seconds)]
        command += ["--warmup", str(self.warmup_seconds)]
        if self.streams:
            command += ["--stream", "--events", str(self.events)]
        if self.pace_ms:
            command += ["--pace-ms", str(self.pace_ms)]
        if self.refused_pause_ms:
            command += ["--refused-pause-ms", str(self.refused_pause_ms)]
        return command


ALL = [
    Scenario("a1", "1 KB chat requests, 32 connections", "1k", 32, 3, 1),
    Scenario("a16", "16 KB chat requests, 32 connections", "16k", 32, 3, 1),
    Scenario("c1", "1 KB chat requests, one connection", "1k", 1, 3, 0.5),
    Scenario("sb", "64 streams of 100 events, not paced", "1k", 64, 3, 1, events=100),
    Scenario("p20", "500 streams of 100 events, one every 20 ms", "1k", 500, 5, 2, events=100, pace_ms=20),
    Scenario("p50", "500 streams of 100 events, one every 50 ms", "1k", 500, 6, 3, events=100, pace_ms=50),
]
DEFAULT = "a1,a16,c1,p20"
SLOTS = 32  # of both engines together, where caps are in force
WAITING = 190
# The same work at the same rate, without and with a line: ours alone knows caps.
FULL = Scenario("full", "a stream for each slot", "1k", SLOTS, 4, 1, events=20, pace_ms=5)
LINE = Scenario("line", "more that wait for one", "1k", SLOTS + WAITING, 4, 1, events=20, pace_ms=5)
# Everything that the gateway does besides: probes, metrics that are read, records that are settled.
SCRAPED = Scenario("scraped", "as p20, metrics read", "1k", 500, 5, 2, events=100, pace_ms=20, scrapes=True)
SMOKE = [
    Scenario("a1", "1 KB chat requests, 32 connections", "1k", 32, 1.5, 0.5),
    Scenario("a16", "16 KB chat requests, 32 connections", "16k", 32, 1.5, 0.5),
    Scenario("p20", "100 streams of 50 events, one every 20 ms", "1k", 100, 2, 1, events=50, pace_ms=20),
]


def named(names: str) -> list[Scenario]:
    """The scenarios of a comma-separated list, in its order."""
    known = {scenario.name: scenario for scenario in ALL}
    wanted = names.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no test {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted]
