"""One replica's view of the fleet's table: its own blocks, and the changes that it proposes. Pure.

A record counts once its replica is *proven*: seen present, seen to renew its record, or listed by a proven replica. The
other records, and unreadable ones, may be junk or forged. They belong to *strangers*, which together count as one
silent replica with at most an even part of each engine.

The caller reads the table, proposes a change, obeys `limit` from then on, sends the change, and reports the result. It
does so once a second, and more often while requests wait.
"""

from collections.abc import Callable, Mapping

from gateway.core.routing.engine import EngineUse
from gateway.features.coordination.blocks import (
    CLOSED_SECONDS,
    HOLD_SECONDS,
    MISSING_SECONDS,
    NONE,
    SILENT_SECONDS,
    Wish,
    both,
    carried,
    targets,
)
from gateway.features.coordination.records import (
    MOST_KNOWN,
    VERSION,
    EngineRecord,
    Records,
    ReplicaRecord,
    read_record,
    unreadable,
    write_record,
)
from gateway.features.coordination.store import Table, TableChange

_NOTHING = EngineRecord(NONE, NONE, NONE, NONE)


class ReplicaBlocks:
    """The blocks of one replica. `new_version` returns a unique name for each change."""

    def __init__(self, replica: str, expected_replicas: int, new_version: Callable[[], str]) -> None:
        self.replica = replica
        self.peers: frozenset[str] = frozenset()  # other replicas that were not silent when the table was last read
        self.missing = 0  # number of silent replicas, whose blocks are kept free
        self.unread: set[str] = set()  # strangers with unreadable records
        self.rich: set[str] = set()  # peers with a surplus of a part that this one lacks
        self.poor: set[str] = set()  # peers that lack a part that the proposed change gives up
        self.lacked: set[str] = set()  # engines of which a peer lacks a part
        self.has_changed = False  # the last change of the table changed this replica's blocks
        self.is_failing = False  # a call failed, and no change was applied since
        self._new_version = new_version
        self._count, self._order = expected_replicas, [replica]  # divisor and order of even parts
        self._renewed_seconds: float | None = None
        self._held: dict[str, EngineUse] = {}  # usable until the blocks lapse
        self._granted: dict[str, EngineUse] = {}  # `_held` at the last renewal
        self._number = 0
        self._table: Table | None = None
        self._records: Records = {}  # of the table, and those carried over from a lost one
        self._memory: Records = {}  # the last records of the era of this replica's last write
        self._era = ""  # the era of `_memory`
        self._seen_era, self._era_since = "", 0.0
        self._silent: dict[str, tuple[int, float]] = {}  # by replica: number of its record, and since when
        self._proven: set[str] = set()  # replicas whose records count
        self._strangers: set[str] = set()  # all other replicas, and those with unreadable records

    @property
    def lapses_seconds(self) -> float:
        """When the blocks lapse, by this replica's clock."""
        return 0.0 if self._renewed_seconds is None else self._renewed_seconds + HOLD_SECONDS

    @property
    def live(self) -> int:
        """The number of live replicas, this one included."""
        return len(self.peers) + 1

    @property
    def knows_table(self) -> bool:
        return self._table is not None

    @property
    def known(self) -> set[str]:
        return {*self._records}

    def is_current(self, now: float) -> bool:
        """Whether the blocks are renewed, and have not lapsed."""
        return now < self.lapses_seconds

    def limit(self, key: str, whole: EngineUse, now: float) -> EngineUse:
        """The most that may be in flight on an engine. After a lapse, no new requests until a call fails: the process
        may have been paused."""
        if self.is_current(now):
            return self._held.get(key, NONE)
        if not self.is_failing:
            return NONE
        even = self._even(self._order.index(self.replica), whole)
        since = self._renewed_seconds
        if since is None or now - since >= MISSING_SECONDS or key not in self._held:
            return even
        return both(self._held[key], even, min)

    def _even(self, place: int, whole: EngineUse) -> EngineUse:
        """The even part of an engine for the replica at this place; the last place is that of all strangers
        together."""
        return EngineUse._make(amount // self._count + (place < amount % self._count) for amount in whole)

    def failed(self) -> None:
        """A call failed; its effect is unknown."""
        self.is_failing, self._table = True, None
        self.lacked = set()

    def saw(self, table: Table, received: float) -> None:
        """The table was read. `received`: the time of its answer."""
        self._table = table
        found = self._read(table)
        if not table.era or table.era != self._seen_era:
            self._seen_era, self._era_since = table.era, received
        if table.era == self._era:
            self._records = dict(found)  # a copy: proposals are not remembered before they are applied
        else:
            self._records = found | carried(self._memory, found, self.replica)
        silent = self._silent
        for replica, record in self._records.items():
            if replica not in silent or silent[replica][0] != record.number:
                if replica in silent:
                    self._proven.add(replica)
                silent[replica] = record.number, received
        self._silent = {replica: since for replica, since in silent.items() if replica in self._records}
        self._prove(table.present)
        others = [each for each in self._records if each != self.replica]
        self._strangers = {each for each in others if each in self.unread or each not in self._proven}
        if table.era == self._era:
            self._memory = {each: record for each, record in found.items() if each not in self._strangers}
        self.peers = frozenset(each for each in others if not self._is_silent(each, received))
        self.missing = len(others) - len(self.peers)
        self._count, self._order = self.live + bool(self._strangers), sorted((*self.peers, self.replica))

    def _read(self, table: Table) -> Records:
        """The records of a table; for one that has become unreadable, its last readable version."""
        found: Records = {}
        self.unread = set()
        for replica, data in table.records.items():
            record = read_record(replica, data)
            if record is None and replica == self.replica:
                continue  # it is written anew
            if record is None and (record := self._memory.get(replica)) is None:
                self.unread.add(replica)
                record = unreadable(data)
            found[replica] = record
        return found

    def _prove(self, present: frozenset[str]) -> None:
        """Add replicas that are present, and those listed by proven replicas."""
        proven = (self._proven | present) & self._records.keys()
        known = [self._records[each].known for each in proven]
        self._proven = proven.union(*known) & self._records.keys()

    def _is_silent(self, replica: str, now: float) -> bool:
        return replica in self._strangers or self._silence(replica, now) >= SILENT_SECONDS

    def _silence(self, replica: str, now: float) -> float:
        return now - self._silent[replica][1]

    def _has_ended(self, replica: str, now: float) -> bool:
        """Whether its process has ended, or has been silent for so long that its block is free."""
        silence, table = self._silence(replica, now), self._table
        if replica == self.replica or silence < SILENT_SECONDS or table is None:
            return False
        is_closed = self._records[replica].shown == table.stamp.run and replica not in table.present
        return (is_closed and silence < CLOSED_SECONDS) or silence >= MISSING_SECONDS

    def propose(self, wishes: Mapping[str, Wish], age_seconds: float, now: float) -> TableChange:
        """The change to send now. Stop using the parts that it gives up before sending it. Requires a table that was
        read."""
        table = self._table
        assert table is not None
        removed = [replica for replica in self._records if self._has_ended(replica, now)]
        for replica in removed:
            del self._records[replica]
        is_settled = table.settled or (table.era != "" and now - self._era_since >= SILENT_SECONDS)
        own = self._records.get(self.replica) if table.era == self._era else None  # None: another replica's table
        others = [
            (replica, record, self._is_silent(replica, now))
            for replica, record in self._records.items()
            if replica != self.replica
        ]
        shares: dict[str, EngineRecord] = {}
        self.rich, self.poor, self.lacked = set(), set(), set()
        for key in dict.fromkeys((*wishes, *(own.shares if own else self._held))):
            wish = wishes.get(key) or Wish(NONE, NONE, NONE, NONE)
            # The base that may be kept. At most the smaller one of the table's block and the usable one: after a failed
            # call, the table may contain a change that this replica does not know, or lack one that it proposed.
            if own is not None:
                before = both(own.shares[key].block, self._held.get(key, NONE), min) if key in own.shares else NONE
            elif self._era not in ("", table.era) and key in self._held:  # the table was lost; the block is still held
                before = self.limit(key, wish.whole, now)
            else:  # a new replica or engine, or the others removed this replica
                before = NONE
            block = self._sized(key, wish, age_seconds=age_seconds, before=before, others=others, grows=is_settled)
            # A smaller block holds from now on, a larger one after the table has it (`answered`).
            if key in self._held or block != NONE:
                self._held[key] = both(self._held.get(key, NONE), block, min)
            if key in wishes or block != NONE:
                shares[key] = _record(block, wish)
        self._number += 1
        run = table.stamp.run
        shown = run if self.replica in table.present else own.shown if own is not None else ""
        known = sorted(self._records.keys() - self.peers - self._strangers - {self.replica})[:MOST_KNOWN]
        record = ReplicaRecord(
            self._number, shown, age_seconds=age_seconds, shares=shares, version=VERSION, known=tuple(known)
        )
        self._records[self.replica] = record
        changed = self._records if table.era != self._era else {self.replica: self._records[self.replica]}
        written = {each: write_record(record) for each, record in changed.items() if each not in self.unread}
        return TableChange(table.stamp, self._new_version(), is_settled, records=written, removed=tuple(removed))

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
        """The block to write; notes the peers with a surplus or a lack. `others`: each with whether it is silent.

        All replicas compute the targets of all by the same rule from the same table, so they converge without
        negotiating: one write shrinks a block to its target, and the next writes of the others grow into the free part.
        The sum stays within the cap because a block grows only into capacity that no other record holds, and a change
        applies only to the version of the table that was read.
        """
        rows: list[tuple[float, str, EngineRecord]] = [(-age_seconds, self.replica, _record(before, wish))]
        whole, taken, fixed = [*wish.whole], NONE, NONE
        last = self._even(self._count - 1, wish.whole)
        claimed = last if self.unread else NONE  # by all strangers together
        # `fixed` is not divided by demand: a silent replica's block, as its requests may go on in the engine; at most
        # an even part for all strangers, so that forged records cannot take an engine; and the larger one of block and
        # even part of a replica with another version, whose demand is unknown. `taken` is held in the table now.
        for replica, record, is_silent in others:
            share = record.shares.get(key, _NOTHING)
            if replica in self._strangers:
                claimed = both(claimed, share.block, int.__add__)
                continue
            taken = both(taken, share.block, int.__add__)
            if is_silent:
                fixed = both(fixed, share.block, int.__add__)
            elif record.version != VERSION:  # its wish cannot be read
                even = self._even(self._order.index(replica), wish.whole)
                fixed = both(fixed, both(share.block, even, max), int.__add__)
            else:
                rows.append((-record.age_seconds, replica, share))
                for at, amount in enumerate(share.whole):
                    whole[at] = min(whole[at] or amount, amount or whole[at])
        claimed = both(claimed, last, min)
        taken, fixed = both(taken, claimed, int.__add__), both(fixed, claimed, int.__add__)
        rows.sort(key=lambda row: row[:2])
        place = [row[1] for row in rows].index(self.replica)
        block = []
        # The target, but never below the requests in flight, and above `before` only by capacity that is free in the
        # table. No growth before the table is settled: after a loss, the new one may lack blocks that are in use.
        for at, total in enumerate(whole):
            fits = targets(total - fixed[at], [(share.need[at], share.wanted[at]) for _, _, share in rows])
            room = max(before[at], total - taken[at]) if grows else before[at]
            block.append(max(wish.used[at], min(fits[place], room)))
            lacks = block[at] < min(fits[place], max(1, wish.wanted[at]))
            self._note(key, at, rows, fits, lacks=lacks, gives=block[at] < before[at])
        return EngineUse._make(block)

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
        """Note peers with a surplus or a lack of an engine's slots or tokens, compared with their targets."""
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
        """The change that removes this replica, with nothing in flight; None = the table is unknown."""
        table = self._table
        if table is None or table.era != self._era:
            return None
        return TableChange(table.stamp, self._new_version(), table.settled, records={}, removed=(self.replica,))

    def answered(self, table: Table, sent: float, received: float, *, applied: bool) -> None:
        """The change was answered with the current table. `sent`: a time before it was sent."""
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
