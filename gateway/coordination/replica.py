"""One replica among those of the fleet: what it may use now, and how it changes its record in the table. Pure.

The caller reads the table, proposes a change, obeys `limit` from then on, and sends the change; then it reports what
became of it. It does so once a second, and sooner when requests wait.
"""

from collections.abc import Callable, Mapping

import msgspec

from gateway.coordination.blocks import (
    CLOSED_SECONDS,
    HOLD_SECONDS,
    MISSING_SECONDS,
    NONE,
    SILENT_SECONDS,
    EngineRecord,
    Records,
    ReplicaRecord,
    Wish,
    both,
    carried,
    targets,
)
from gateway.coordination.store import Table, TableChange
from gateway.routing.engine import EngineUse

_DECODER = msgspec.msgpack.Decoder(ReplicaRecord)
_ENCODER = msgspec.msgpack.Encoder()
_NOTHING = EngineRecord(NONE, NONE, NONE, NONE)


class ReplicaBlocks:
    """The blocks of one replica. `new_version` makes a name for a change, never the same twice."""

    def __init__(self, replica: str, expected_replicas: int, new_version: Callable[[], str]) -> None:
        self.replica = replica
        self.peers: frozenset[str] = frozenset()  # other replicas that were not silent when the table was last read
        self.missing = 0  # silent ones, whose blocks are kept free
        self.rich: set[str] = set()  # peers that have what this one lacks, and may not need it
        self.poor: set[str] = set()  # peers that lack what this one gives up by the change that it proposed
        self.lacked: set[str] = set()  # engines of which a peer lacks a part
        self.has_changed = False  # the last change of the table was one of the own blocks
        self.is_failing = False  # no call succeeded since the last one that failed
        self._new_version = new_version
        self._count, self._place = expected_replicas, 0  # of replicas for even parts; the own place among them
        self._renewed_seconds: float | None = None
        self._held: dict[str, EngineUse] = {}  # what may be used until it lapses
        self._granted: dict[str, EngineUse] = {}  # the same as it was when it was last renewed
        self._number = 0
        self._table: Table | None = None
        self._records: Records = {}  # of the table, with those that it lost
        self._memory: Records = {}  # the last records of the era in which this replica last wrote
        self._era = ""  # that era
        self._seen_era, self._era_since = "", 0.0
        self._silent: dict[str, tuple[int, float]] = {}  # by replica: the number of its record, and since when

    @property
    def lapses_seconds(self) -> float:
        """When the blocks lapse, by the own clock."""
        return 0.0 if self._renewed_seconds is None else self._renewed_seconds + HOLD_SECONDS

    @property
    def live(self) -> int:
        """So many replicas share the fleet, this one included."""
        return len(self.peers) + 1

    @property
    def knows_table(self) -> bool:
        return self._table is not None

    @property
    def known(self) -> set[str]:
        """The replicas of which this one knows."""
        return {*self._records}

    def is_current(self, now: float) -> bool:
        """Whether the blocks are renewed, and have not lapsed."""
        return now < self.lapses_seconds

    def limit(self, key: str, whole: EngineUse, now: float) -> EngineUse:
        """What may be in flight on an engine. After a lapse, nothing new until a call has failed since: this process
        may have been paused."""
        if self.is_current(now):
            return self._held.get(key, NONE)
        if not self.is_failing:
            return NONE
        even = EngineUse(*[amount // self._count + (self._place < amount % self._count) for amount in whole])
        since = self._renewed_seconds
        if since is None or now - since >= MISSING_SECONDS or key not in self._held:
            return even
        return both(self._held[key], even, min)

    def failed(self) -> None:
        """A call failed; whether it had an effect is not known."""
        self.is_failing, self._table = True, None
        self.lacked = set()

    def saw(self, table: Table, received: float) -> None:
        """The table was read. `received`: when the answer had come."""
        self._table = table
        found = {replica: _DECODER.decode(record) for replica, record in table.records.items()}
        if not table.era or table.era != self._seen_era:
            self._seen_era, self._era_since = table.era, received
        if table.era == self._era:
            self._memory, self._records = found, dict(found)  # what is proposed is not remembered before it is applied
        else:
            self._records = found | carried(self._memory, found, self.replica)
        silent = self._silent
        for replica, record in self._records.items():
            if replica not in silent or silent[replica][0] != record.number:
                silent[replica] = record.number, received
        self._silent = {replica: since for replica, since in silent.items() if replica in self._records}
        others = [each for each in self._records if each != self.replica]
        self.peers = frozenset(each for each in others if self._silence(each, received) < SILENT_SECONDS)
        self.missing = len(others) - len(self.peers)
        self._count, self._place = self.live, sum(each < self.replica for each in self.peers)

    def _silence(self, replica: str, now: float) -> float:
        return now - self._silent[replica][1]

    def _has_ended(self, replica: str, now: float) -> bool:
        """Whether its block is free for certain, or as certainly as can be known."""
        silence, table = self._silence(replica, now), self._table
        if replica == self.replica or silence < SILENT_SECONDS or table is None:
            return False
        is_closed = self._records[replica].shown == table.stamp.run and replica not in table.present
        return (is_closed and silence < CLOSED_SECONDS) or silence >= MISSING_SECONDS

    def propose(self, wishes: Mapping[str, Wish], age_seconds: float, now: float) -> TableChange:
        """The change to send now; what it gives up must not be used any more. The table must have been read."""
        table = self._table
        assert table is not None
        removed = [replica for replica in self._records if self._has_ended(replica, now)]
        for replica in removed:
            del self._records[replica]
        is_settled = table.settled or (table.era != "" and now - self._era_since >= SILENT_SECONDS)
        own = self._records.get(self.replica) if table.era == self._era else None  # else another replica wrote it
        others = [
            (replica, record, self._silence(replica, now) >= SILENT_SECONDS)
            for replica, record in self._records.items()
            if replica != self.replica
        ]
        shares: dict[str, EngineRecord] = {}
        self.rich, self.poor, self.lacked = set(), set(), set()
        for key in dict.fromkeys((*wishes, *(own.shares if own else self._held))):
            wish = wishes.get(key) or Wish(NONE, NONE, NONE, NONE)
            if own is not None:
                before = own.shares[key].block if key in own.shares else NONE
            elif self._era not in ("", table.era) and key in self._held:  # the table was lost, and not the block
                before = self.limit(key, wish.whole, now)
            else:  # it is new, or others took it for ended
                before = NONE
            block = self._sized(key, wish, age_seconds, before, others, grows=is_settled)
            if key in self._held or block != NONE:
                self._held[key] = both(self._held.get(key, NONE), block, min)
            if key in wishes or block != NONE:
                shares[key] = _record(block, wish)
        self._number += 1
        run = table.stamp.run
        shown = run if self.replica in table.present else own.shown if own is not None else ""
        self._records[self.replica] = ReplicaRecord(self._number, shown, age_seconds, shares)
        changed = self._records if table.era != self._era else {self.replica: self._records[self.replica]}
        written = {replica: _ENCODER.encode(record) for replica, record in changed.items()}
        return TableChange(table.stamp, self._new_version(), is_settled, written, tuple(removed))

    def _sized(
        self,
        key: str,
        wish: Wish,
        age_seconds: float,
        before: EngineUse,
        others: list[tuple[str, ReplicaRecord, bool]],
        *,
        grows: bool,
    ) -> EngineUse:
        """The block to write; notes who has or lacks a part. `others`: with whether each is silent."""
        rows: list[tuple[float, str, EngineRecord]] = [(-age_seconds, self.replica, _record(before, wish))]
        whole, taken, fixed = [*wish.whole], [0, 0], [0, 0]
        for replica, record, is_silent in others:
            share = record.shares.get(key)
            if share is not None:
                for at, amount in enumerate(share.block):
                    taken[at] += amount
                    if is_silent:
                        fixed[at] += amount
            if is_silent:
                continue
            if share is None:
                rows.append((-record.age_seconds, replica, _NOTHING))
                continue
            rows.append((-record.age_seconds, replica, share))
            for at, amount in enumerate(share.whole):
                whole[at] = min(whole[at] or amount, amount or whole[at])
        rows.sort(key=lambda row: row[:2])
        place = [row[1] for row in rows].index(self.replica)
        block = []
        for at, total in enumerate(whole):
            fits = targets(total - fixed[at], [(share.need[at], share.wanted[at]) for _, _, share in rows])
            room = max(before[at], total - taken[at]) if grows else before[at]
            block.append(max(wish.used[at], min(fits[place], room)))
            lacks = block[at] < min(fits[place], max(1, wish.wanted[at]))
            self._note(key, at, rows, fits, lacks=lacks, gives=block[at] < before[at])
        return EngineUse(*block)

    def _note(
        self,
        key: str,
        at: int,
        rows: list[tuple[float, str, EngineRecord]],
        fits: list[int],
        *,
        lacks: bool,
        gives: bool,
    ) -> None:
        """Who of the others has more than fits, and who less, of an engine's slots or tokens."""
        for (age, replica, share), fit in zip(rows, fits, strict=True):
            if replica == self.replica:
                continue
            if share.block[at] < min(fit, share.wanted[at]):
                self.lacked.add(key)
                if gives:
                    self.poor.add(replica)
            elif lacks and share.block[at] > fit and (not age or share.block[at] > share.wanted[at]):
                self.rich.add(replica)

    def leave(self) -> TableChange | None:
        """The change that removes this replica, which has nothing in flight any more; None = the table is not known."""
        table = self._table
        if table is None or table.era != self._era:
            return None
        return TableChange(table.stamp, self._new_version(), table.settled, {}, (self.replica,))

    def answered(self, table: Table, sent: float, received: float, *, applied: bool) -> None:
        """The change was answered with the table as it is now. `sent`: a time before it was sent."""
        if applied:
            self._era = table.era
        self.saw(table, received)
        if applied:
            self._renewed_seconds, self.is_failing = sent, False
            held = {key: share.block for key, share in self._records[self.replica].shares.items()}
            self._held, self.has_changed = held, held != self._granted
            self._granted = held


def _record(block: EngineUse, wish: Wish) -> EngineRecord:
    return EngineRecord(block, wish.wanted, wish.need, wish.whole)
