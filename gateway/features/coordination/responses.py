"""Shares the places of stored responses: a client may continue a response through any gateway of the fleet. Pure.

Each gateway sends the places that it noted itself. A new peer gets the latest known places of the others.
"""

from collections import deque
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.features.coordination.records import UNREADABLE
from gateway.features.coordination.updates import MOST_BYTES
from gateway.features.responses.stored import Place, StoredResponses

_FORMAT: Final = "1"
_MOST_PLACES: Final = 256  # in a message
_MOST_KNOWN: Final = 4096  # that a new peer gets

_Text = Annotated[str, Meta(max_length=1024)]


class SentPlace(msgspec.Struct, frozen=True, array_like=True):
    """A response and its place; backends have the same names at all gateways."""

    response: Annotated[str, Meta(min_length=1, max_length=256)]
    backend: _Text
    model: _Text
    key: _Text
    tenant: _Text
    alias: _Text


class SentPlaces(msgspec.Struct, frozen=True, array_like=True):
    """A message; other formats are ignored."""

    format: _Text
    places: Annotated[list[SentPlace], Meta(max_length=_MOST_PLACES)]


class ResponseExchange:
    """Places of stored responses to send to peers, and learning from theirs."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored
        self._unsent: deque[tuple[str, Place]] = deque(maxlen=_MOST_KNOWN)
        stored.on_own = self._unsent.append
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(SentPlaces).decode

    def peer_joined(self) -> None:
        """Send the known places again, in the order of noting."""
        known = self._stored.since(self._stored.noted - _MOST_KNOWN)
        self._unsent.clear()
        self._unsent.extend(reversed(known))

    def due(self) -> bytes | None:
        """The message to send now, until `sent` is called."""
        if not self._unsent:
            return None
        some = [self._unsent[at] for at in range(min(_MOST_PLACES, len(self._unsent)))]
        places = [
            SentPlace(name, place.backend, place.model, key=place.owner[0], tenant=place.owner[1], alias=place.alias)
            for name, place in some
        ]
        return self._encode(SentPlaces(_FORMAT, places))

    def sent(self) -> None:
        for _ in range(min(_MOST_PLACES, len(self._unsent))):
            self._unsent.popleft()

    def receive(self, data: bytes) -> bool:
        """Note a peer's places; returns whether they could be read. A known response keeps its place."""
        if len(data) > MOST_BYTES:
            return False
        try:
            message = self._decode(data)
        except UNREADABLE:
            return False
        if message.format != _FORMAT:
            return False
        found = [
            (each.response, Place(each.backend, each.model, (each.key, each.tenant), alias=each.alias))
            for each in message.places
        ]
        self._stored.restore(reversed(found))
        return True
