"""Which state of a model vectors belong to: what its backends say of it, and how often they have been restarted."""

from gateway.backends.backend import Backend
from gateway.backends.registry import Fleet


class Revisions:
    """Names the present state of a model. A name that was given up never comes back, unless nothing has changed."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._served_by: dict[str, set[Backend]] = {}  # ever
        self._restarts: dict[Backend, int] = {}

    def restarted(self, backend: Backend) -> None:
        """Another process answers there, maybe with other weights under the same names."""
        self._restarts[backend] = self._restarts.get(backend, 0) + 1

    def of(self, model: str) -> bytes:
        """The state of a model. Names that no backend has listed are not remembered."""
        cards = set()
        for backend in self._fleet.backends:
            for card in backend.facts.models:
                if card.id == model:
                    self._served_by.setdefault(model, set()).add(backend)
                    cards.add((card.root or "", card.parent or "", card.max_model_len or 0))
        restarts = sum(self._restarts.get(backend, 0) for backend in self._served_by.get(model, ()))
        return repr((sorted(cards), restarts)).encode()
