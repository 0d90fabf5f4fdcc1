"""An engine that may be given requests, as placement sees it."""

from typing import Protocol


class Candidate(Protocol):
    """What placement asks of an engine: a backend, or one of the engines of a backend that runs several."""

    @property
    def name(self) -> str:
        """The backend's name."""

    @property
    def index(self) -> int:
        """Its number, unlike that of any other engine."""

    @property
    def rank(self) -> int | None:
        """Which of the backend's engines it is; None if the backend has one, or chooses by itself."""

    @property
    def speed(self) -> float:
        """Relative time for the same work."""

    @property
    def cap(self) -> int:
        """Most sequences at once."""

    @property
    def kv_cache_tokens(self) -> int | None:
        """Size of its KV cache."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block of it."""

    @property
    def caches_prefixes(self) -> bool:
        """Whether a prompt sent there before is still of use."""

    def limit(self, now_seconds: float) -> int:
        """Sequences that it may have in flight now."""
