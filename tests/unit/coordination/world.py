"""A fleet, its replicas and their store in virtual time, with faults: the rules run as in a gateway."""

import heapq
import math
from collections.abc import Callable, Generator
from itertools import count
from random import Random
from typing import Any

from gateway.core.routing.engine import EngineUse
from gateway.features.coordination.blocks import NONE, Wish
from gateway.features.coordination.replica import ReplicaBlocks
from gateway.features.coordination.store import SharedTable, Table, TableChange

TIMEOUT_SECONDS, TICK_SECONDS, SOON_SECONDS = 0.8, 1.0, 0.1


class Server:
    """The store: a table of one run, and who is present. Changes of a former run are void."""

    def __init__(self) -> None:
        self.runs = count(1)
        self.is_up = True
        self.present: set[str] = set()
        self.start()

    def start(self) -> None:
        """Another run: what it knows of the former one is void."""
        self.is_up = True
        self.present.clear()
        self.shared = SharedTable(f"run{next(self.runs)}")

    def flush(self) -> None:
        self.shared = SharedTable(self.shared.run)

    def table(self) -> Table:
        return self.shared.read(frozenset(self.present))

    def swap(self, change: TableChange) -> bool:
        return self.shared.swap(change)


class World:
    """All of it. `run` goes through a schedule; `caps` are never exceeded, or it raises AssertionError. `is_easy`: no
    request is large or long."""

    def __init__(self, seed: int, caps: tuple[EngineUse, ...], *, is_easy: bool = False) -> None:
        self.is_easy = is_easy
        self.random = Random(seed)
        self.now = 0.0
        self.caps = caps
        self.server = Server()
        self.replicas: list[Member] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = count()
        self.real = [NONE] * len(caps)  # what the engines have in flight
        self.peaks = [NONE] * len(caps)
        self.served = 0
        self.lost_seconds = -math.inf
        self.losses: list[tuple[float, set[str]]] = []  # of the table: when, and who remembers those that are cut off

    def table_lost(self) -> None:
        """The table is lost: of replicas that cannot write now, only those know that can."""
        self.lost_seconds = self.now
        able = {each.name for each in self.replicas if each.is_able and each.blocks.is_current(each.clock())}
        for member in self.replicas:
            if member.is_alive and not member.is_able:
                knowing = {name for name in able if member.name in self.member(name).blocks.known}
                self.losses.append((self.now, knowing))

    def struck(self, member: "Member") -> None:
        """A fault of a replica: soon after a loss of the table, what it remembers is lost, too, and its own record."""
        if self.now - self.lost_seconds < 5.0:
            able = {each.name for each in self.replicas if each.is_able and member.name in each.blocks.known}
            self.losses.append((self.lost_seconds, able - {member.name}))
        for when, knowing in self.losses:
            if self.now - when < 5.0:
                knowing.discard(member.name)

    @property
    def is_forgotten(self) -> bool:
        """Whether a replica may be cut off of which no other knows: the one case in which a cap may be exceeded."""
        return any(not knowing for _, knowing in self.losses)

    def member(self, name: str) -> "Member":
        return next(each for each in self.replicas if each.name == name)

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), do))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, do = heapq.heappop(self.events)
            do()
        self.now = until

    def join(self, busy: float) -> "Member":
        member = Member(self, f"r{len(self.replicas)}", busy)
        self.replicas.append(member)
        return member

    def begin(self, engine: int, use: EngineUse) -> None:
        self.real[engine] = EngineUse._make(a + b for a, b in zip(self.real[engine], use, strict=True))
        self.peaks[engine] = EngineUse._make(map(max, self.peaks[engine], self.real[engine]))
        assert all(a <= b for a, b in zip(self.real[engine], self.caps[engine], strict=True)), (
            f"{'forgotten: ' if self.is_forgotten else ''}engine {engine} has {self.real[engine]} at {self.now:.3f} s"
        )
        self.served += 1

    def end(self, engine: int, use: EngineUse) -> None:
        self.real[engine] = EngineUse._make(a - b for a, b in zip(self.real[engine], use, strict=True))


class Member:
    """One replica, with requests of its own. `busy`: how many arrive in a second."""

    def __init__(self, world: World, name: str, busy: float) -> None:
        self.world, self.name, self.busy = world, name, busy
        self.is_alive, self.is_paused, self.is_cut, self.loses = True, False, False, False
        self.offset, self.rate = world.random.uniform(-1e4, 1e4), 1 + world.random.uniform(-2e-4, 2e-4)
        versions = (f"{name}:{number}" for number in count())
        self.blocks = ReplicaBlocks(name, 2, lambda: next(versions))
        self.served = 0
        self.used = [NONE] * len(world.caps)
        self.waiting: list[list[tuple[EngineUse, float]]] = [[] for _ in world.caps]
        self.live: dict[int, tuple[int, EngineUse]] = {}  # on the engines
        self.held_back: list[Callable[[], None]] = []
        self.is_calling = self.wants_call = False
        self.numbers = count()
        self.do(self.present)
        self.do(self.tick)
        self.do(self.arrive)

    @property
    def is_able(self) -> bool:
        """Whether it can use the store."""
        return self.is_alive and not (self.is_paused or self.is_cut or self.loses)

    def clock(self) -> float:
        return self.offset + self.rate * self.world.now

    def do(self, what: Callable[[], None], seconds: float = 0.0) -> None:
        """Do this later, unless the process has ended; while it is paused, when it goes on."""

        def run() -> None:
            if self.is_paused:
                self.held_back.append(run)
            elif self.is_alive:
                what()

        self.world.at(seconds, run)

    def resume(self) -> None:
        self.is_paused = False
        for run in self.held_back:
            self.world.at(self.world.random.uniform(0, 0.01), run)
        self.held_back = []

    def kill(self) -> None:
        """Its connections close, and the engines abort its requests."""
        self.world.struck(self)
        self.is_alive = False
        self.world.server.present.discard(self.name)
        for engine, use in self.live.values():
            self.world.end(engine, use)
        self.live.clear()

    def present(self) -> None:
        if self.world.server.is_up and not self.is_cut:
            self.world.server.present.add(self.name)
        self.do(self.present, 0.25)

    def arrive(self) -> None:
        random = self.world.random
        self.do(self.arrive, random.expovariate(self.busy))
        engine = random.randrange(len(self.world.caps))
        cap = self.world.caps[engine]
        slots = 1 if self.world.is_easy or random.random() < 0.9 else random.randint(1, cap.slots)
        use = EngineUse(
            slots,
            random.randint(1, max(1, cap.kv_tokens // random.choice((20,) if self.world.is_easy else (2, 8, 20)))),
        )
        if len(self.waiting[engine]) < 10:
            self.waiting[engine].append((use, self.clock()))
        self.admit()
        if any(self.waiting):
            self.call_soon()

    def admit(self) -> None:
        if not self.blocks.lapses_seconds:  # never reached the store: what it uses then is a guess, tested alone
            return
        for engine, cap in enumerate(self.world.caps):
            limit = self.blocks.limit(f"e{engine}", cap, self.clock())
            for each in [*self.waiting[engine]]:
                use, used = each[0], self.used[engine]
                if used.slots + use.slots <= limit.slots and used.kv_tokens + use.kv_tokens <= limit.kv_tokens:
                    self.waiting[engine].remove(each)
                    self.start(engine, use)

    def start(self, engine: int, use: EngineUse) -> None:
        number, world = next(self.numbers), self.world
        self.used[engine] = EngineUse._make(a + b for a, b in zip(self.used[engine], use, strict=True))
        self.live[number] = engine, use
        self.served += 1
        world.begin(engine, use)

        def ended() -> None:
            if self.live.pop(number, None):
                world.end(engine, use)
                self.do(seen)

        def seen() -> None:
            self.used[engine] = EngineUse._make(a - b for a, b in zip(self.used[engine], use, strict=True))
            self.admit()

        world.at(
            world.random.choice((0.05, 0.5) if world.is_easy else (0.05, 0.5, 3.0, 20.0))
            * world.random.uniform(0.5, 1.5),
            ended,
        )

    def tick(self) -> None:
        self.do(self.tick, TICK_SECONDS)
        self.call()

    def call_soon(self) -> None:
        if not self.wants_call:
            self.wants_call = True
            self.do(self.call, SOON_SECONDS)

    def call(self) -> None:
        self.wants_call = False
        if not self.is_calling:
            self.is_calling = True
            self.step(self.conversation())

    def step(self, talk: Generator[tuple[TableChange | None], Any, None], answer: Any = None) -> None:
        try:
            (change,) = talk.send(answer)
        except StopIteration:
            self.is_calling = False
            self.admit()
            return
        self.send(talk, change)

    def send(self, talk: Any, change: TableChange | None) -> None:
        """A call on its way: it may be lost, or the answer, or it may come late."""
        world, is_over = self.world, False
        there, back = world.random.uniform(0.0005, 0.03), world.random.uniform(0.0005, 0.03)

        def finish(answer: Any) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self.step(talk, answer)

        def arrives() -> None:
            if world.server.is_up:
                applied = change is not None and world.server.swap(change)
                table = world.server.table()
                if not self.is_cut and not self.loses:
                    self.do(lambda: finish((applied, table)), back)

        self.do(lambda: finish(None), TIMEOUT_SECONDS)
        if not self.is_cut:
            world.at(there, arrives)
        elif world.random.random() < 0.1:
            world.at(world.random.uniform(0, 5), arrives)

    def conversation(self) -> Generator[tuple[TableChange | None], Any, None]:
        blocks, caps = self.blocks, self.world.caps
        if not blocks.knows_table:
            answer = yield (None,)
            if answer is None:
                blocks.failed()
                return
            blocks.saw(answer[1], self.clock())
        for _ in range(8):
            wishes = {f"e{at}": self.wish(at) for at in range(len(caps))}
            oldest = min((since for each in self.waiting for _, since in each), default=self.clock())
            sent = self.clock()
            change = blocks.propose(wishes, sent - oldest, sent)
            answer = yield (change,)
            if answer is None:
                blocks.failed()
                return
            applied, table = answer
            blocks.answered(table, sent, self.clock(), applied=applied)
            if applied:
                return
        blocks.failed()

    def wish(self, engine: int) -> Wish:
        used, cap = self.used[engine], self.world.caps[engine]
        wanted, need = used, NONE
        for use, _ in self.waiting[engine]:
            wanted = EngineUse._make(a + b for a, b in zip(wanted, use, strict=True))
            need = EngineUse._make(map(max, need, use))
        # In all: what the largest request needs while others are in flight.
        needed = [min(a + b, most) for a, b, most in zip(used, need, cap, strict=True)] if need != NONE else used
        return Wish(used, EngineUse._make(map(min, wanted, cap)), EngineUse._make(needed), cap)
