"""The messages between gateways: prompts that were sent to engines, and loads in flight. Pure.

Engines are named by a hash of their URL and rank, since each gateway numbers them on its own. Block keys are hashes
that are the same in every gateway. Messages come through a server that others may use: each is validated before use,
and a malformed one is refused as a whole.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from gateway.features.coordination.records import UNREADABLE

FORMAT: Final = f"2 {sys.byteorder}"  # changes with the format of messages
MOST_BYTES: Final = 1 << 20  # of an accepted message
MOST_KEYS: Final = 8192  # blocks in a message; a prompt has at most some 4,700
MOST_CHAINS: Final = 1024  # in a message, so that it is applied within a few milliseconds
MOST_EDGE_BYTES: Final = 1 << 28  # of a prompt or an answer
_MOST_ENGINES: Final = 16_384
_MOST_TOKENS: Final = 1 << 40
_MOST_SECONDS: Final = 86_400.0

Name = Annotated[str, Meta(min_length=1, max_length=64)]
Hash = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, le=_MOST_TOKENS)]
Seconds = Annotated[float, Meta(ge=0.0, le=_MOST_SECONDS)]
Packed = Annotated[bytes, Meta(max_length=MOST_BYTES)]
Chain = tuple[int, tuple[int, ...], tuple[int, ...]]  # place of the engine, keys, edges


class UpdateRefused(Exception):
    """A message was refused; the text is the reason, in one word for a metric."""


class NamedEngine(msgspec.Struct, frozen=True, array_like=True):
    """An engine in a message, and how often its blocks were forgotten."""

    hash: Hash
    generation: Count = 0


class SentLoad(msgspec.Struct, frozen=True, array_like=True):
    """The sender's load on one engine, all zero = none; `at`: the engine's place in the message."""

    at: Count
    in_flight: Count
    decoding: Count
    context_tokens: Count
    ahead_seconds: Seconds
    prefill_share: Annotated[float, Meta(ge=0.0, le=1000.0)]


class Chains(msgspec.Struct, frozen=True, array_like=True):
    """Prompts as packed arrays: for each its engine's place and number of blocks, then all keys and all edges."""

    places: Packed = b""
    counts: Packed = b""
    keys: Packed = b""
    edges: Packed = b""


class Update(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The sender's changes since its last update. A gap in `number` shows a lost update. `is_whole`: engines without a
    load here have none; otherwise their last load holds."""

    format: Annotated[str, Meta(max_length=16)]
    sender: Name
    number: Count
    engines: Annotated[list[NamedEngine], Meta(max_length=_MOST_ENGINES)]
    loads: Annotated[list[SentLoad], Meta(max_length=_MOST_ENGINES)]
    chains: Chains
    is_whole: bool = True


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Requests a snapshot: all that the recipient knows."""

    format: Annotated[str, Meta(max_length=16)]
    sender: Name
    number: Count  # of the sender's question


class Part(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A part of the answer to the recipient's question `number`."""

    format: Annotated[str, Meta(max_length=16)]
    sender: Name
    number: Count
    part: Count
    is_last: bool
    engines: Annotated[list[NamedEngine], Meta(max_length=_MOST_ENGINES)]
    chains: Chains


Message = Update | Ask | Part
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Message).decode


def hash_of(engine: str) -> int:
    """The name of an engine in messages; `engine` has its URL and rank."""
    return xxh3_64_intdigest(engine.encode())


def encode(message: Message) -> bytes:
    return _encode(message)


def decode(data: bytes) -> Message:
    """Raises UpdateRefused. Chains are checked when they are unpacked."""
    if len(data) > MOST_BYTES:
        raise UpdateRefused("too_long")
    try:
        message: Message = _decode(data)
    except UNREADABLE as error:
        raise UpdateRefused("malformed") from error
    if message.format != FORMAT:
        raise UpdateRefused("other_version")
    return message


def pack(chains: Iterable[Chain]) -> Chains:
    places, counts, keys, edges = array("H"), array("H"), array("Q"), array("I")
    for place, chain_keys, chain_edges in chains:
        places.append(place)
        counts.append(len(chain_keys))
        keys.extend(chain_keys)
        edges.extend(chain_edges)
    return Chains(places.tobytes(), counts.tobytes(), keys.tobytes(), edges.tobytes())


def unpack(chains: Chains, engines: int) -> list[Chain]:
    """The prompts in order; `engines`: the number of engines in the message. Raises UpdateRefused."""
    if len(chains.counts) > 2 * MOST_CHAINS or len(chains.keys) > 8 * MOST_KEYS:
        raise UpdateRefused("too_long")
    places, counts, keys, edges = array("H"), array("H"), array("Q"), array("I")
    try:
        for packed, given in ((places, chains.places), (counts, chains.counts)):
            packed.frombytes(given)
        keys.frombytes(chains.keys)
        edges.frombytes(chains.edges)
    except ValueError as error:
        raise UpdateRefused("malformed") from error
    if len(places) != len(counts) or not sum(counts) == len(keys) == len(edges):
        raise UpdateRefused("malformed")
    if places and (max(places) >= engines or not min(counts) or max(edges) > MOST_EDGE_BYTES):
        raise UpdateRefused("malformed")
    found, start = [], 0
    for place, count in zip(places, counts, strict=True):
        end = start + count
        found.append((place, tuple(keys[start:end]), tuple(edges[start:end])))
        start = end
    return found


def split(chains: Sequence[Chain]) -> Iterator[Sequence[Chain]]:
    """Groups of one message each; omits prompts that exceed a message."""
    start = keys = 0
    for at, (_, chain_keys, chain_edges) in enumerate(chains):
        count = len(chain_keys)
        is_too_long = count > MOST_KEYS or not count or chain_edges[-1] > MOST_EDGE_BYTES
        if is_too_long or keys + count > MOST_KEYS or at - start >= MOST_CHAINS:
            if start < at:
                yield chains[start:at]
            start, keys = at, 0
        if is_too_long:
            start = at + 1
        else:
            keys += count
    if start < len(chains):
        yield chains[start:]
