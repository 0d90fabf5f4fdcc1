"""How KV events are encoded: by name, and by position as older engines did."""

import msgspec
import pytest

from loadtest.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Encoding, Event, encoder
from tests.unit.loadtest.engine.kv_client import read_batch

STORED = BlockStored(
    block_hashes=[2**64 - 1, b"\x01" * 32],
    parent_block_hash=5,
    token_ids=[1, 2, 3, 4],
    block_size=2,
    lora_id=None,
    medium="GPU",
    lora_name="adapter",
    extra_keys=[("adapter", "salt"), ("adapter",)],
    group_idx=0,
    kv_cache_spec_kind="full_attention",
)
EVENTS: list[Event] = [AllBlocksCleared(), BlockRemoved([5], "GPU", 0), STORED]


def test_a_batch_is_an_array_of_time_events_and_rank() -> None:
    payload = encoder(Encoding.MAP)(1.5, [AllBlocksCleared()], 3)
    assert payload == b"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x91\x81\xa4type\xb0AllBlocksCleared\x03"


def test_named_fields_begin_with_the_type_and_leave_out_what_is_not_set() -> None:
    [event] = msgspec.msgpack.decode(encoder(Encoding.MAP)(0.0, [STORED], 0))[1]
    assert [*event] == [
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ]


@pytest.mark.parametrize(("event", "length"), [(STORED, 12), (EVENTS[1], 4), (EVENTS[0], 1)])
def test_positions_are_as_many_as_older_engines_had(event: Event, length: int) -> None:
    [array] = msgspec.msgpack.decode(encoder(Encoding.ARRAY)(0.0, [event], 0))[1]
    assert (len(array), array[0]) == (length, type(event).__name__)


def test_both_encodings_say_the_same() -> None:
    by_name, by_position = (
        read_batch([b"topic", (7).to_bytes(8, "big"), encoder(encoding)(1.5, EVENTS, 2)]) for encoding in Encoding
    )
    assert by_name == by_position
    assert by_name.events[2]["block_hashes"] == [2**64 - 1, b"\x01" * 32]
    assert by_name.events[2]["extra_keys"] == [["adapter", "salt"], ["adapter"]]
