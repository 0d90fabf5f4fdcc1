"""Which backend stores a response: it alone can look it up, cancel it, or continue it."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from itertools import islice

from gateway.core.request import BackgroundRun

_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_OPENING_BYTES = 512
_MAX_RESPONSES = 65536


@dataclass(frozen=True, slots=True)
class Place:
    """Where a response is stored: the backend's name and its model. `owner` is the API key's name and the tenant.
    `alias`: the client's name for the model, if it is another."""

    backend: str
    model: str
    owner: tuple[str, str]
    _: KW_ONLY
    alias: str = ""


class StoredResponses:
    """The most recent responses. `cancelled` is called with the id of a response cancelled by its client; `on_own` with
    each response through this gateway."""

    def __init__(self, cancelled: Callable[[str], None] | None = None) -> None:
        self.cancelled = cancelled or _ignore
        self._places: OrderedDict[str, Place] = OrderedDict()
        self.noted = 0  # in all
        self.on_own: Callable[[tuple[str, Place]], None] | None = None

    def remember(self, opening: bytes, place: Place) -> str:
        """Note the response with these first bytes. An id belongs to the first client that had it.

        Returns the id; empty if there is none.
        """
        match = _ID.search(opening[:_OPENING_BYTES])
        if match is None:
            return ""
        response_id = match[1].decode()
        if self.on_own is not None and response_id not in self._places:
            self.on_own((response_id, place))
        self.restore([(response_id, place)])
        return response_id

    def noting(
        self, model: str, owner: tuple[str, str], run: BackgroundRun | None, alias: str = ""
    ) -> Callable[[str, bytes], None]:
        """The receiver of the backend and the first bytes of a response to this client."""

        def note(backend: str, opening: bytes) -> None:
            response_id = self.remember(opening, Place(backend, model, owner, alias=alias))
            if run is not None:
                run.began(response_id)

        return note

    def since(self, noted: int) -> list[tuple[str, Place]]:
        """Those noted after the first `noted` ones, the latest first; `restore` takes them."""
        return list(islice(reversed(self._places.items()), self.noted - noted))

    def restore(self, places: Iterable[tuple[str, Place]]) -> None:
        """Note responses, the latest first; known ones stay."""
        for response_id, place in reversed([*places]):
            self.noted += response_id not in self._places
            self._places.setdefault(response_id, place)
            if len(self._places) > _MAX_RESPONSES:
                self._places.popitem(last=False)

    def find(self, response_id: str, owner: tuple[str, str]) -> Place | None:
        """The backend of this client's response; None if it is unknown, or another client's."""
        place = self._places.get(response_id)
        return place if place is not None and place.owner == owner else None


def _ignore(response_id: str) -> None: ...
