"""Whether a message follows the one before, by its sequence number. Pure.

vLLM numbers its messages from 0 in each process. Messages that were missed are asked for again; they then come a second
time as live ones, which is no restart: only a live number that is not above the live number before it is one.
"""

from enum import Enum

from xxhash import xxh3_64_intdigest


class MessagePlace(Enum):
    """Where a live message stands."""

    NEXT = "next"
    REPEATED = "repeated"  # was already had by a replay
    AFTER_GAP = "after_gap"
    RESTARTED = "restarted"  # another process counts


class Continuity:
    """The numbers of one publisher. `expected` None = nothing was received or asked for yet."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self._last_live: int | None = None
        self._last_digest: int | None = None

    def reset(self) -> None:
        """Another process counts, or nothing is known."""
        self.expected = self._last_live = self._last_digest = None

    def begin(self, sequence: int) -> None:
        """Go on with this number, whatever was before it."""
        self.expected = sequence
        self._last_digest = None

    def place(self, sequence: int) -> MessagePlace:
        """Judge a live message; to be called once for each, in order."""
        last, self._last_live = self._last_live, sequence
        if last is not None and sequence <= last:
            return MessagePlace.RESTARTED
        if self.expected is None or sequence > self.expected:
            return MessagePlace.AFTER_GAP
        return MessagePlace.NEXT if sequence == self.expected else MessagePlace.REPEATED

    def took(self, sequence: int, payload: bytes) -> None:
        """The message was used."""
        self.expected = sequence + 1
        self._last_digest = xxh3_64_intdigest(payload)

    @property
    def can_prove(self) -> bool:
        """Whether a message was used whose repetition proves that the same process still speaks."""
        return self._last_digest is not None

    def proves(self, sequence: int, payload: bytes) -> bool:
        """Whether this is the last message that was used, again."""
        return (
            self.expected is not None
            and sequence == self.expected - 1
            and xxh3_64_intdigest(payload) == self._last_digest
        )
