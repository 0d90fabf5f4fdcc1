"""Shared knowledge of gateways in front of the same engines: the prompts sent to each engine, and its load in flight.

Each gateway publishes its part in numbered updates, at most ten a second, and merges the updates of its peers, the
other replicas in the fleet's table. After a missed update, or after its start, a gateway requests a snapshot from a
peer. Requests never depend on updates: without them, a gateway decides by its own record. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from typing import Final

from gateway.core.routing.engine import LEAST_SHARE, Engine, OtherLoad
from gateway.features.coordination.announced_record import AnnouncedIndex
from gateway.features.coordination.updates import (
    FORMAT,
    Ask,
    Chain,
    Chains,
    NamedEngine,
    Part,
    SentLoad,
    Update,
    UpdateRefused,
    decode,
    encode,
    hash_of,
    pack,
    split,
    unpack,
)

MOST_PEERS: Final = 64
LIFE_SECONDS: Final = 3.0  # lifetime of a gateway's load after its last update
_BUSY_SECONDS: Final = 0.25  # between updates while requests are in flight and there is no other news
_IDLE_SECONDS: Final = 1.0
_FOUND_SECONDS: Final = 2.0  # after this time, a new gateway has heard of all others and requests a snapshot
_ASK_SECONDS: Final = 2.0  # between two questions
_ANSWER_SECONDS: Final = 10.0  # without a further part, an answer has failed
_MOST_RUNS: Final = 50_000  # of an engine, the last used ones
_RUNS_AT_ONCE: Final = 512


@dataclass(slots=True)
class Peer:
    """Another gateway: its last update, and its load in flight by the engine's hash."""

    number: int | None = None  # None = none was heard yet
    heard_seconds: float | None = None  # None = not for a while
    loads: dict[int, OtherLoad] = field(default_factory=dict)


@dataclass(slots=True)
class Question:
    """A snapshot requested from a peer, and the number of the next expected part."""

    peer: str
    number: int
    since_seconds: float
    _: KW_ONLY
    next_part: int = 0


class Exchange:
    """Owner of the state of other gateways. `engines`: each engine with its URL and rank; `is_followed`: whether its
    cache is known from its own KV events; `own`: the name of this replica."""

    def __init__(
        self,
        own: str,
        index: AnnouncedIndex,
        engines: Callable[[], Iterable[tuple[str, Engine]]],
        *,
        is_followed: Callable[[int], bool],
    ) -> None:
        self.own = own
        self.counts: Counter[str] = Counter()  # messages by result
        self._index = index
        self._engines = engines
        self._is_followed = is_followed
        self._by_hash: dict[int, Engine] = {}
        self._hashes: dict[int, int] = {}  # by the engine's number
        self._peers: dict[str, Peer] = {}
        self._lacking: dict[str, None] = {}  # peers with a missed update, in order
        self._is_incomplete = True  # any peer may have missing entries, as at the start
        self._question: Question | None = None
        self._questions = 0
        self._asked_seconds = -_ASK_SECONDS
        self._answers: dict[str, int] = {}  # numbers of questions to be answered, by peer
        self._number = 0
        self._begun_seconds: float | None = None
        self._sent_seconds = -_IDLE_SECONDS  # of an update with all loads
        self._sent_loads: dict[int, tuple[int, int]] = {}  # by the engine's hash
        self._are_others_known = False
        self._to_sum: set[int] = set()  # hashes of engines whose peer loads changed or decay since the last sum
        self.follow_fleet()

    def follow_fleet(self) -> None:
        """Read the engines again after a change of the fleet."""
        named = [(hash_of(key), engine) for key, engine in self._engines()]
        self._by_hash = dict(named)
        self._hashes = {engine.index: number for number, engine in named}
        self._to_sum.update(self._by_hash)
        self._sent_loads = {key: sent for key, sent in self._sent_loads.items() if key in self._by_hash}

    def begin(self) -> None:
        """Skip entries learned before: they are part of a snapshot."""
        self._index.changes()

    def left(self, engines: Iterable[Engine]) -> None:
        """These engines are gone; their numbers will be reused."""
        for engine in engines:
            self._index.begin(engine.index)

    def follow_peers(self, names: Sequence[str]) -> list[str]:
        """Take over the current replicas; returns the names whose updates are used."""
        kept = [name for name in names if name != self.own][:MOST_PEERS]
        for name in self._peers.keys() - {*kept}:
            self._to_sum.update(self._peers.pop(name).loads)
            if name in self._lacking:  # it can no longer be asked
                del self._lacking[name]
                self._is_incomplete = True
        for name in kept:
            if name not in self._peers:
                self._peers[name] = Peer()
                self._sent_seconds = -_IDLE_SECONDS  # send it this gateway's load immediately
        return kept

    def missed(self) -> None:
        """Sending is impossible now: peers detect the gap by the number of the next update."""
        self._index.changes()
        self._number += 1

    def due(self, now: float) -> list[bytes]:
        """The updates to publish now; usually one or none."""
        if self._begun_seconds is None:
            self._begun_seconds = now
        self._add_up(now)
        chains, engines, is_complete = self._news()
        if not is_complete:
            self._number += 1  # peers detect the gap and request a snapshot
        is_whole = now - self._sent_seconds >= (_BUSY_SECONDS if self._sent_loads else _IDLE_SECONDS)
        if is_whole:
            self._sent_seconds = now
        loads = self._loads(engines, now, is_whole=is_whole)
        messages: list[bytes] = []
        if engines or is_whole:
            for group in [*split(chains)] or [()]:
                self._number += 1
                update = Update(
                    FORMAT,
                    self.own,
                    number=self._number,
                    engines=engines,
                    loads=loads,
                    chains=pack(group),
                    is_whole=is_whole,
                )
                messages.append(encode(update))
        self.counts["sent"] += len(messages)
        return messages

    def receive(self, data: bytes, now: float) -> None:
        """Use a message of another gateway, or count the reason for refusing it."""
        try:
            message = decode(data)
            if isinstance(message, Update):
                self._on_update(message, now)
            elif isinstance(message, Part):
                self._on_part(message, now)
            elif len(self._answers) < MOST_PEERS:
                self._answers[message.sender] = message.number
        except UpdateRefused as error:
            self.counts[f"refused_{error}"] += 1

    @property
    def is_asked(self) -> bool:
        return bool(self._answers)

    def next_answer(self) -> tuple[str, Iterator[bytes]] | None:
        """The peer that requested a snapshot, and its parts. Each part is made when it is taken, to keep the event loop
        free."""
        if not self._answers:
            return None
        asker = next(iter(self._answers))
        return asker, self._parts(self._answers.pop(asker))

    # Outgoing messages.

    def _news(self) -> tuple[list[Chain], list[NamedEngine], bool]:
        """Prompts that were sent, with engine places; also names engines whose blocks were forgotten."""
        changes, is_complete = self._index.changes()
        if not self._peers:
            return [], [], True
        places: dict[int, int] = {}  # by the engine's number
        chains: list[Chain] = []
        for number, keys, edges in changes:
            if number not in self._hashes or self._is_followed(number):
                continue
            place = places.setdefault(number, len(places))
            if keys:
                chains.append((place, keys, edges))
            else:
                chains = [chain for chain in chains if chain[0] != place]
        return chains, [self._named(number) for number in places], is_complete

    def _named(self, number: int) -> NamedEngine:
        return NamedEngine(self._hashes[number], self._index.generation(number))

    def _loads(self, engines: list[NamedEngine], now: float, *, is_whole: bool) -> list[SentLoad]:
        """The load of each engine, or only of engines whose sequences changed since the last update. Adds missing ones
        to `engines`."""
        places = {engine.hash: place for place, engine in enumerate(engines)}
        loads = []
        for name, engine in self._by_hash.items():
            load, sent = engine.load, self._sent_loads.get(name, (0, 0))
            if not is_whole and sent == (load.in_flight, load.decoding):
                continue
            share = load.own_prefill_share(now)
            if load.in_flight:
                self._sent_loads[name] = load.in_flight, load.decoding
            else:
                self._sent_loads.pop(name, None)
                if is_whole and share < LEAST_SHARE:
                    continue
            if name not in places:
                places[name] = len(engines)
                engines.append(self._named(engine.index))
            ahead = load.prefill_ahead_seconds(now)
            loads.append(
                SentLoad(
                    places[name],
                    load.in_flight,
                    decoding=load.decoding,
                    context_tokens=max(0, load.context_tokens),
                    ahead_seconds=ahead,
                    prefill_share=min(share, 1000.0),
                )
            )
        return loads

    def next_question(self, now: float) -> tuple[str, bytes] | None:
        """The peer to request a snapshot from now, and the message: a peer with a missed update, or any peer at the
        start."""
        question = self._question
        if question is not None and now - question.since_seconds > _ANSWER_SECONDS:
            self.counts["snapshots_failed"] += 1
            self._question = question = None
        if question is not None or now - self._asked_seconds < _ASK_SECONDS:
            return None
        live = [name for name, peer in self._peers.items() if peer.heard_seconds is not None]
        asked = next((name for name in self._lacking if name in live), None)
        if asked is None and self._is_incomplete and live:
            asked = live[self._questions % len(live)]
        if asked is None:
            return None
        self._questions += 1
        self._asked_seconds = now
        self._question = Question(asked, self._questions, now)
        self.counts["snapshots_asked"] += 1
        return asked, encode(Ask(FORMAT, self.own, self._questions))

    def _parts(self, number: int) -> Iterator[bytes]:
        part = 0
        self.counts["snapshots_sent"] += 1
        for key in [*self._hashes]:
            if key not in self._hashes or self._is_followed(key):
                continue
            runs = self._index.runs(key, _MOST_RUNS)
            for start in range(0, len(runs), _RUNS_AT_ONCE):
                some = runs[start : start + _RUNS_AT_ONCE]
                chains = [(0, keys[: len(sizes)], tuple(accumulate(sizes))) for keys, sizes in some]
                for group in split(chains):
                    yield encode(
                        Part(
                            FORMAT,
                            self.own,
                            number=number,
                            part=part,
                            is_last=False,
                            engines=[self._named(key)],
                            chains=pack(group),
                        )
                    )
                    part += 1
        engines = [self._named(key) for key in self._hashes]
        yield encode(Part(FORMAT, self.own, number=number, part=part, is_last=True, engines=engines, chains=Chains()))

    # Incoming messages.

    def _on_update(self, update: Update, now: float) -> None:
        chains = unpack(update.chains, len(update.engines))
        if any(load.at >= len(update.engines) for load in update.loads):
            raise UpdateRefused("malformed")
        sender, number = update.sender, update.number
        if (peer := self._peers.get(sender)) is None:
            raise UpdateRefused("unknown_gateway")
        if peer.number is None:
            if number > 1 and self._begun_seconds is not None and now - self._begun_seconds > _FOUND_SECONDS:
                self._lacking[sender] = None
        elif number <= peer.number:
            self.counts["repeated"] += 1
            return
        elif number > peer.number + 1:
            self.counts["gaps"] += 1
            self._lacking[sender] = None
        peer.number, peer.heard_seconds = number, now
        if update.is_whole:
            self._to_sum.update(peer.loads)
            peer.loads = {}
        for load in update.loads:
            engine = update.engines[load.at].hash
            peer.loads[engine] = OtherLoad(
                load.in_flight,
                load.decoding,
                load.context_tokens,
                ahead_seconds=load.ahead_seconds,
                prefill_share=load.prefill_share,
            )
            self._to_sum.add(engine)
        self.counts["used"] += 1
        self._copy(update.engines, chains)

    def _on_part(self, part: Part, now: float) -> None:
        question = self._question
        is_expected = question is not None and (part.sender, part.number) == (question.peer, question.number)
        if question is None or not is_expected or part.part != question.next_part:
            self.counts["repeated"] += 1  # or a part was lost: the question is repeated later
            return
        self._copy(part.engines, unpack(part.chains, len(part.engines)))
        question.next_part += 1
        question.since_seconds = now
        if part.is_last:
            self.counts["snapshots_used"] += 1
            self._is_incomplete = False
            self._question = None
            self._lacking.pop(part.sender, None)

    def _copy(self, named: list[NamedEngine], chains: list[Chain]) -> None:
        index, engines = self._index, list[int | None]()
        for each in named:
            engine = self._by_hash.get(each.hash)
            is_current = engine is not None and index.follow_generation(engine.index, each.generation)
            engines.append(engine.index if is_current and engine is not None else None)
        for place, keys, edges in chains:
            if (number := engines[place]) is not None:
                index.copy(number, keys, edges)

    def _add_up(self, now: float) -> None:
        """Add up the loads of live peers, for the costs of requests."""
        live = []
        for name, peer in self._peers.items():
            if peer.heard_seconds is None:
                continue
            if now - peer.heard_seconds > LIFE_SECONDS:
                self._to_sum.update(peer.loads)
                peer.heard_seconds, peer.loads = None, {}
                self._lacking[name] = None
            else:
                live.append((peer, now - peer.heard_seconds))
        if self._are_others_known != bool(live):
            self._are_others_known = bool(live)
            self._to_sum.update(self._by_hash)
        to_sum, self._to_sum = self._to_sum, set()
        for key in to_sum:
            if (engine := self._by_hash.get(key)) is None:
                continue
            others = _sum([(peer.loads[key], age) for peer, age in live if key in peer.loads]) if live else None
            if others is not None and others.ahead_seconds > 0.0:
                self._to_sum.add(key)  # the prefill ahead shrinks with time
            if others != engine.load.others:
                engine.load.follow_others(others, now)


def _sum(loads: list[tuple[OtherLoad, float]]) -> OtherLoad:
    """The sum of all loads; each prefill backlog is reduced by the seconds since it was sent."""
    in_flight = decoding = context_tokens = 0
    ahead_seconds = prefill_share = 0.0
    for load, age_seconds in loads:
        in_flight += load.in_flight
        decoding += load.decoding
        context_tokens += load.context_tokens
        ahead_seconds += max(0.0, load.ahead_seconds - age_seconds)
        prefill_share += load.prefill_share
    return OtherLoad(in_flight, decoding, context_tokens, ahead_seconds=ahead_seconds, prefill_share=prefill_share)
