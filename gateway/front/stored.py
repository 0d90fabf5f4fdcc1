"""Which backend stores which response of /v1/responses, and whose it is."""

import re
from collections import OrderedDict
from dataclasses import dataclass

_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_MAX_RESPONSES = 65536


@dataclass(frozen=True, slots=True)
class Place:
    """Where a response is stored: the backend's name, its model, and the name of the client's key."""

    backend: str
    model: str
    client: str


class StoredResponses:
    """The most recent responses."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, Place] = OrderedDict()

    def remember(self, opening: bytes, place: Place) -> None:
        """Note the response whose first bytes these are."""
        if match := _ID.search(opening):
            self._places[match[1].decode()] = place
            if len(self._places) > _MAX_RESPONSES:
                self._places.popitem(last=False)

    def find(self, response_id: str, client: str) -> Place | None:
        """Where this client's response is; None if it is not known, or another client's."""
        place = self._places.get(response_id)
        return place if place is not None and place.client == client else None
