"""Gateways of a test that exchange messages in virtual time, over a channel that can lose, repeat and reorder them."""

from dataclasses import dataclass, field
from random import Random

from gateway.core.routing.engine import Engine
from gateway.features.coordination.announced_record import AnnouncedIndex
from gateway.features.coordination.exchange import Exchange

STEP_SECONDS = 0.05


class Replica:
    """One gateway: its record, its engines (numbered in an order of its own), and its exchange."""

    def __init__(self, name: str, engines: list[str], capacity_bytes: int = 1 << 30) -> None:
        self.index = AnnouncedIndex()
        self.engines = {key: Engine(number, key) for number, key in enumerate(engines)}
        for engine in self.engines.values():
            self.index.resize(engine.index, capacity_bytes)
        self.followed: set[int] = set()
        self.exchange = Exchange(
            name, self.index, lambda: list(self.engines.items()), is_followed=self.followed.__contains__
        )

    def send(self, engine: str, *keys: int) -> None:
        """A prompt with these blocks goes to the engine."""
        edges = tuple(100 * (place + 1) for place in range(len(keys)))
        self.index.record(self.engines[engine].index, keys, edges)

    def forget(self, engine: str) -> None:
        self.index.wipe(self.engines[engine].index)

    def holds(self, engine: str, *keys: int) -> bool:
        return self.index.depths(keys)[self.engines[engine].index] == len(keys)

    def held(self) -> dict[str, set[int]]:
        """All blocks of each engine."""
        return {
            key: {block for keys, _ in self.index.runs(engine.index, 1 << 20) for block in keys}
            for key, engine in self.engines.items()
        }


@dataclass
class Channel:
    """Carries what replicas publish. `loss`: share of deliveries that fail; `disorder`: that come later or twice."""

    replicas: list[Replica]
    random: Random = field(default_factory=Random)
    loss: float = 0.0
    disorder: float = 0.0
    now: float = 0.0
    late: list[tuple[Replica, bytes]] = field(default_factory=list)

    def step(self, seconds: float = STEP_SECONDS) -> None:
        """Every replica publishes what is due, and answers."""
        self.now += seconds
        for replica in self.replicas:
            replica.exchange.follow_peers([each.exchange.own for each in self.replicas])
        for replica in self.replicas:
            for message in replica.exchange.due(self.now):
                self.publish(replica, message)
            if (question := replica.exchange.next_question(self.now)) is not None:
                self._deliver_to(*question)
            while (answer := replica.exchange.next_answer()) is not None:
                asker, parts = answer
                for part in parts:
                    self._deliver_to(asker, part)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_SECONDS)):
            self.step()

    def publish(self, sender: Replica, message: bytes) -> None:
        late, self.late = self.late, []
        for to in self.replicas:
            if to is not sender:
                self._deliver(to, message)
        for to, earlier in late:
            to.exchange.receive(earlier, self.now)

    def _deliver_to(self, name: str, message: bytes) -> None:
        for to in self.replicas:
            if to.exchange.own == name:
                self._deliver(to, message)

    def _deliver(self, to: Replica, message: bytes) -> None:
        if self.random.random() < self.loss:
            return
        if self.random.random() < self.disorder:
            self.late.append((to, message))
            if self.random.random() < 0.5:
                return
        to.exchange.receive(message, self.now)
