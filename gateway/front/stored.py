"""Which backend stores which response of /v1/responses, and which client owns it."""

import re
from collections import OrderedDict
from dataclasses import dataclass

_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_OPENING_BYTES = 512
_MAX_RESPONSES = 65536


@dataclass(frozen=True, slots=True)
class Place:
    """Where a response is stored: the backend's name and its model. `owner` is the API key's name and the tenant."""

    backend: str
    model: str
    owner: tuple[str, str]


class StoredResponses:
    """The most recent responses."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, Place] = OrderedDict()

    def remember(self, opening: bytes, place: Place) -> None:
        """Note the response whose first bytes these are. An id stays with the client that had it first."""
        if match := _ID.search(opening[:_OPENING_BYTES]):
            self._places.setdefault(match[1].decode(), place)
            if len(self._places) > _MAX_RESPONSES:
                self._places.popitem(last=False)

    def find(self, response_id: str, owner: tuple[str, str]) -> Place | None:
        """Where this client's response is; None if it is not known, or another client's."""
        place = self._places.get(response_id)
        return place if place is not None and place.owner == owner else None
