"""The gateway's view of the LoRA adapters in one engine's GPU slots, and the cost of a missing adapter. Pure.

An engine loads the adapter of an arriving request in place of the least recently used one. It reports the adapters of
running requests, not the contents of its slots; so adapters of sent requests count as well. While other adapters use
all slots, a request waits until one of them is idle.
"""

from typing import Final

LOAD_SECONDS: Final = 0.2  # an adapter from the engine's memory, or from its disk, to its GPU
WAIT_SECONDS: Final = 5.0  # until a slot in use is free: about half an answer


class AdapterSlots:
    """The adapters of one engine. `names`: its listed adapters; `most`: slots on its GPU, None = unknown."""

    __slots__ = ("_loaded", "_running", "most", "names")

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.most: int | None = None
        self._loaded: dict[str, None] = {}  # least recently used first
        self._running: frozenset[str] = frozenset()  # in the engine's last report

    def __repr__(self) -> str:
        return f"<AdapterSlots {', '.join(self._loaded) or 'none'} of {self.most} slots>"

    @property
    def loaded(self) -> list[str]:
        """The adapters that are thought to be on the GPU, least recently used first."""
        return list(self._loaded)

    def update(self, names: frozenset[str]) -> None:
        """Take over the engine's list. An adapter that is missing from it has left its slot."""
        if names != self.names:
            self.names = names
            self._loaded = {name: None for name in self._loaded if name in names}

    def use(self, model: str) -> None:
        """A request for this model is sent to the engine."""
        if model in self.names:
            self._loaded.pop(model, None)
            self._loaded[model] = None
            self._evict()

    def report(self, running: frozenset[str], most: int | None) -> None:
        """The engine reported its running adapters and its number of slots."""
        self.most, self._running = most, running & self.names
        for name in sorted(self._running):
            self._loaded.setdefault(name, None)
        self._evict()

    def forget(self) -> None:
        """Another process runs: its slots are empty."""
        self._loaded.clear()
        self._running = frozenset()

    def seconds(self, model: str) -> float:
        """The seconds that a request for this model waits for its adapter."""
        if model not in self.names or model in self._loaded:
            return 0.0
        is_taken = self.most is not None and len(self._running) >= self.most
        return LOAD_SECONDS + WAIT_SECONDS if is_taken else LOAD_SECONDS

    def _evict(self) -> None:
        """Evict the least recently used adapters beyond the slots, running ones last; never the newest."""
        most = self.most
        if most is None:
            return
        while len(self._loaded) > most:
            others = self.loaded[:-1]
            idle = [name for name in others if name not in self._running]
            del self._loaded[(idle or others)[0]]
