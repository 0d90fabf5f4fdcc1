import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.exact.events import (
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    Cleared,
    Removed,
    Stored,
    read_events,
    read_frames,
)
from gateway.features.exact.stream import END_OF_REPLAY
from tests.unit.exact.publisher import removed, stored


def payload(*events: object, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events)] + ([] if rank is None else [rank]))


def test_events_are_read_as_maps() -> None:
    first, second, third = read_events(
        payload(stored([7, 8], [1, 2, 3, 4], None, 2), removed([9]), {"type": "AllBlocksCleared"})
    )
    assert isinstance(first, Stored)
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([7, 8], None, [1, 2, 3, 4])
    assert (first.block_size, first.medium, first.group_idx) == (2, "GPU", 0)
    assert first.kv_cache_spec_kind == "full_attention"
    assert isinstance(second, Removed)
    assert (second.block_hashes, second.medium, second.group_idx) == ([9], "GPU", 0)
    assert isinstance(third, Cleared)


@pytest.mark.parametrize("more", [[], ["GPU"], ["GPU", None, None, 0, "full_attention", None, "LOCAL", None, "new"]])
def test_events_are_read_as_rows(more: list[object]) -> None:
    rows = [["BlockStored", [b"h"], b"p", [1, 2], 2, None, *more], ["BlockRemoved", [b"h"]], ["AllBlocksCleared"]]
    first, second, third = read_events(payload(*rows))
    assert isinstance(first, Stored)
    assert (first.block_hashes, first.parent_block_hash, first.block_size) == ([b"h"], b"p", 2)
    assert first.medium == ("GPU" if more else None)
    assert first.group_idx == (0 if len(more) > 3 else None)
    assert isinstance(second, Removed)
    assert second.block_hashes == [b"h"]
    assert isinstance(third, Cleared)


def test_a_rank_is_optional_and_a_time_may_be_whole() -> None:
    assert read_events(payload(rank=None)) == []
    assert read_events(msgspec.msgpack.encode([3, [], 5, "more"])) == []


@pytest.mark.parametrize("unknown", [{"type": "BlockMoved", "x": 1}, ["BlockMoved", 1, 2]])
@pytest.mark.parametrize("known", [removed([1]), ["BlockRemoved", [1], "GPU"]])
def test_events_of_unknown_types_are_passed_over(unknown: object, known: object) -> None:
    events = read_events(payload(unknown, known, unknown))
    assert [isinstance(event, Removed) for event in events] == [True]


def test_unknown_fields_are_passed_over() -> None:
    [event] = read_events(payload(stored([1], [5], None, 1) | {"lookahead_token_ids": [3], "locality": "LOCAL"}))
    assert isinstance(event, Stored)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\x91",
        b"\xc1",
        b"\x91" * 5000,
        b"\xff" * 100,
        payload({"type": "BlockStored"}),
        payload({"no": "type"}),
        payload({"type": 7}),
        payload([]),
        payload([7]),
        payload(7),
        payload(stored([1.5], [1], None, 1)),
        payload(stored([1], [1], None, -1)),
        payload(stored([1], [1], None, 1 << 40)),
        payload(stored([1], ["a"], None, 1)),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode({"ts": 1}),
        payload(removed([1]))[:-1],
    ],
)
def test_what_is_malformed_is_a_value_error(bad: bytes) -> None:
    with pytest.raises(ValueError, match=r"malformed|no type"):
        read_events(bad)


@pytest.mark.parametrize("header", [b"\xdd\x00\x01\x00\x01", b"\xdd\xff\xff\xff\xff"])
def test_a_payload_with_too_many_events_is_refused_before_they_are_read(header: bytes) -> None:
    with pytest.raises(ValueError, match=r"too many events|malformed"):
        read_events(b"\x92\x01" + header + b"\x01" * (MAX_EVENTS + 1))


@pytest.mark.parametrize("extra", [[[]] * 500, ["s" * 2000], [[["a"] * 200] * 3]])
def test_an_event_with_extra_keys_that_are_too_long_is_passed_over(extra: list[object]) -> None:
    event = {**stored([1], [5], None, 1), "extra_keys": [extra * 3]}
    assert [type(each) for each in read_events(payload(event, removed([9])))] == [Removed]


def test_extra_keys_are_read() -> None:
    keys = [["salt", ["cat.png", -2]], None, [b"digest"]]
    for event in ({**stored([1, 2, 3], [5, 6, 7], None, 1), "extra_keys": keys},
                  ["BlockStored", [1, 2, 3], None, [5, 6, 7], 1, None, "GPU", None, keys]):  # fmt: skip
        [read] = read_events(payload(event))
        assert isinstance(read, Stored)
        assert read.extra_keys == keys


def test_others_may_run_between_events() -> None:
    breaths = list[None]()
    read_events(payload(*[removed([1])] * 10), lambda: breaths.append(None))
    assert len(breaths) == 10


def test_a_payload_beyond_the_limit_is_not_read() -> None:
    with pytest.raises(ValueError, match="too large"):
        read_events(b"\x90" * (MAX_PAYLOAD_BYTES + 1))


@given(st.binary(max_size=200))
def test_noise_is_a_value_error_or_a_batch(noise: bytes) -> None:
    try:
        read_events(noise)
    except ValueError:
        return


@given(st.data())
def test_a_damaged_batch_is_a_value_error_or_a_batch(data: st.DataObject) -> None:
    whole = payload(stored([7, 8], [1, 2, 3, 4], None, 2), removed([9]), ["BlockRemoved", [3]])
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:place] + data.draw(st.binary(max_size=3)) + whole[place + 1 :]
    try:
        read_events(damaged)
    except ValueError:
        return


def test_frames_are_topic_number_and_payload() -> None:
    assert read_frames([b"t", (5).to_bytes(8, "big"), b"p"]) == (b"t", 5, b"p")
    assert read_frames([b"", END_OF_REPLAY, b""])[1] == (1 << 64) - 1
    for bad in ([], [b"t"], [b"t", b"12345678"], [b"t", b"123", b"p"], [b"t", b"12345678", b"p", b"x"]):
        with pytest.raises(ValueError, match=r"frames|sequence"):
            read_frames(bad)
