"""Whatever is in the table: no replica stops serving, no cap is exceeded, and versions take part together."""

import copy
import math
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.routing.engine import EngineUse
from gateway.features.coordination import records, replica
from gateway.features.coordination.records import MOST_NAME_BYTES, VERSION, ReplicaRecord, read_record, write_record
from tests.unit.coordination.world import Member, World

CAPS = EngineUse(8, 20_000), EngineUse(3, 1000)
JUNK = "junk"
SHARE = [[2, 500], [2, 500], [1, 100], [8, 20_000]]
RECORD: list[Any] = [7, "run1", 0.5, {"e0": SHARE, "e1": [[1, 100], [1, 100], [1, 100], [3, 1000]]}, VERSION, ["r9"]]
HOSTILE: dict[str, Any] = {
    "nothing": None, "true": True, "negative": -1, "zero": 0, "a cap": 8, "a thousand million": 10**9,
    "more than 63 bits": 2**64 - 1, "no number": math.nan, "infinite": math.inf, "minus infinite": -math.inf,
    "empty": "", "text": "text", "a huge text": "x" * 100_000, "bytes": b"\xff\x00", "a list": [], "a map": {},
    "a long list": [10**9] * 10_000, "a list of lists": [[10**9] * 4] * 4, "a map of all": {"e0": [[10**9] * 2] * 4},
}  # fmt: skip
WHOLE = {
    "no bytes": b"", "junk": b"\xc1junk", "text": b"not a record", "a number": b"\x01", "deep": b"\x91" * 100_000,
    "cut off": msgspec.msgpack.encode(RECORD)[:-3], "bad UTF-8": b"\x94\x01\xa2\xff\xfe\x00\x80",
    "a promise of bytes": b"\xdd\xff\xff\xff\xff", "long": b"\x00" * (5 << 20),
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Each field of a record, and each part of it."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def forged(path: tuple[Any, ...], value: Any) -> bytes:
    document = copy.deepcopy(RECORD)
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return msgspec.msgpack.encode(document)


FIELDS = [*places(RECORD)]
UNREADABLE = [forged((3,), []), forged((0,), -1), *WHOLE.values()]
NAMES = [JUNK, "", "x" * (MOST_NAME_BYTES + 1), "\\xff"]


def serves(world: World, *members: Member) -> None:
    """Each replica goes on at once, and together they use all but an even part of each engine."""
    for _ in range(3):
        before, most = [member.served for member in members], [0] * len(CAPS)
        for _ in range(20):
            world.run(world.now + 0.1)
            for at, cap in enumerate(CAPS):
                slots = [member.blocks.limit(f"e{at}", cap, member.clock()).slots for member in members]
                most[at] = max(most[at], sum(slots))
        assert all(member.served > served + 5 for member, served in zip(members, before, strict=True))
        assert all(each >= cap.slots - cap.slots // (len(members) + 1) for each, cap in zip(most, CAPS, strict=True))


def put(world: World, data: bytes, *names: str) -> None:
    """As a client of the server that knows nothing of versions."""
    world.server.shared.records.update(dict.fromkeys(names, data))


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_records_with_whatever_in_a_field_cost_an_even_part_at_most(field: tuple[Any, ...]) -> None:
    world = World(1, CAPS, is_easy=True)
    one = world.join(20.0)
    world.run(8)
    for number, value in enumerate(HOSTILE.values()):
        put(world, forged(field, value), f"{JUNK}{number}")
    serves(world, one)
    other = world.join(20.0)  # one that starts while they are there
    world.run(world.now + 1)
    serves(world, one, other)


@pytest.mark.parametrize("data", [*WHOLE.values()], ids=[*WHOLE])
def test_a_record_that_cannot_be_read_costs_an_even_part_at_most(data: bytes) -> None:
    world = World(1, CAPS, is_easy=True)
    one = world.join(20.0)
    world.run(8)
    put(world, data, *NAMES)
    serves(world, one)
    assert one.blocks.missing == len(NAMES)


@pytest.mark.parametrize("data", UNREADABLE)
@pytest.mark.parametrize("whose", ["r0", "r1"])
def test_a_record_that_is_overwritten_is_written_anew_and_no_cap_is_exceeded(data: bytes, whose: str) -> None:
    world = World(2, CAPS, is_easy=True)
    members = [world.join(20.0), world.join(20.0)]
    world.run(8)
    put(world, data, whose)
    serves(world, *members)
    assert all(member.blocks.live == 2 for member in members)


def test_thousands_of_records_that_cannot_be_read_count_as_one_replica() -> None:
    world = World(3, CAPS, is_easy=True)
    one = world.join(20.0)
    world.run(8)
    put(world, b"junk", *[f"junk{number}" for number in range(500)])
    serves(world, one)
    assert one.blocks.missing == 500


def test_junk_is_removed_in_the_end() -> None:
    world = World(4, CAPS, is_easy=True)
    one = world.join(1.0)
    world.run(8)
    put(world, b"junk", JUNK)
    world.run(world.now + 620)
    assert JUNK not in world.server.shared.records
    assert (one.blocks.missing, one.blocks.unread) == (0, set())
    assert one.blocks.limit("e0", CAPS[0], one.clock()).slots == 8


def test_a_silent_replica_keeps_its_whole_block_from_those_that_have_not_seen_it() -> None:
    """What one that knows it says of it is enough, though it never showed its presence to this run of the server."""
    world = World(5, CAPS)
    busy, other = world.join(50.0), world.join(0.2)
    world.run(10)
    busy.is_cut = True
    world.server.present.discard(busy.name)
    world.server.start()
    world.run(world.now + 8)
    third = world.join(20.0)
    world.run(world.now + 8)
    assert busy.name in third.blocks.known
    held = busy.blocks.limit("e0", CAPS[0], busy.clock()).slots
    free = 8 - held - other.blocks.limit("e0", CAPS[0], other.clock()).slots
    assert third.blocks.limit("e0", CAPS[0], third.clock()).slots <= free


class Later:
    """Replicas of a later version among those of this one: each writes and reads as its own version does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.kind, self.version = kind, VERSION if "compatible" in kind else VERSION + 1
        for name in ("propose", "saw"):
            monkeypatch.setattr(replica.ReplicaBlocks, name, self.as_version(monkeypatch, name))

    def as_version(self, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
        method = getattr(replica.ReplicaBlocks, name)

        def call(blocks: replica.ReplicaBlocks, *arguments: Any) -> Any:
            if not blocks.replica.endswith(("1", "3")):
                return method(blocks, *arguments)
            with monkeypatch.context() as patch:
                for module in (records, replica):
                    patch.setattr(module, "VERSION", self.version)
                patch.setattr(replica, "write_record", self.write)
                return method(blocks, *arguments)

        return call

    def write(self, record: ReplicaRecord) -> bytes:
        """Its own record, with fields of other types where it has them; those of others as they are."""
        document = msgspec.to_builtins(record)
        if record.version == self.version and "other types" in self.kind:
            document[2] = {"first": record.age_seconds}
            document[3] = {key: [share[0], {"slots": share[1][0]}] for key, share in document[3].items()}
        if record.version == self.version and "more fields" in self.kind:
            document += ["more", {"fields": [1, 2]}]
        return msgspec.msgpack.encode(document)


@pytest.mark.parametrize(
    "kind", ["of the same fields", "of more fields", "of other types", "of more fields, compatible"]
)
@pytest.mark.parametrize("seed", range(6))
def test_two_versions_share_the_engines_exactly_while_one_replaces_the_other(
    seed: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world asserts that no cap is exceeded. Replicas with odd numbers are of the later version."""
    Later(monkeypatch, kind)
    world, random = World(seed, CAPS, is_easy=True), Random(seed)
    members = [world.join(20.0)]
    for _ in range(4):
        world.run(world.now + 6)
        members.append(world.join(random.choice((5.0, 20.0))))
        world.run(world.now + 6)
        assert all(member.blocks.live == len(members) for member in members)
        assert all(not member.blocks.unread and not member.blocks.missing for member in members)
        before = [member.served for member in members]
        world.run(world.now + 2)
        assert all(member.served > served for member, served in zip(members, before, strict=True))
        if len(members) > 2:
            members.pop(0).kill()
            world.run(world.now + 6)


@given(
    st.lists(st.tuples(st.text("ab", max_size=3), st.integers(0, 1 << 40))), st.floats(0, 1000), st.integers(0, 1 << 60)
)
def test_what_is_written_is_read_as_it_was(shares: list[tuple[str, int]], age: float, number: int) -> None:
    uses = [(key, EngineUse(amount, amount)) for key, amount in shares]
    written = {key: records.EngineRecord(use, use, use, use) for key, use in uses}
    record = ReplicaRecord(number, "run", age, written, VERSION, ("a", "b"))
    assert read_record("a", write_record(record)) == record


def test_a_record_of_the_first_release_is_read() -> None:
    assert read_record("a", msgspec.msgpack.encode(RECORD[:4])) == msgspec.convert([*RECORD[:4]], ReplicaRecord)


@given(st.binary(max_size=64))
def test_no_bytes_raise(data: bytes) -> None:
    read_record("a", data)
