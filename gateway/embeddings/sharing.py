"""Inputs that are computed once for all who ask for them: a source owns a part of a batch, sharers wait for sources.

A source belongs to nobody: the client who came first may leave, and it stays while one other waits.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

from gateway.embeddings.answer import Vectors
from gateway.embeddings.member import ByItself, Member, Outcome, Refused, Served
from gateway.embeddings.part import Part
from gateway.embeddings.split import shares
from gateway.errors import BackendError, DeadlineUnmeetable, GatewayError
from gateway.observe.record import Record
from gateway.request import EmbeddingInputs, InferenceRequest


class Computed(NamedTuple):
    """One input's vector. `exact`: the tokens are its own, and not its share of a sum."""

    entry: dict[str, Any]
    tokens: int
    exact: bool


class Wanted(NamedTuple):
    """An input of a source, and where a request has it."""

    at: int
    places: list[int]


class Sharer(Member):
    """A request some of whose inputs are known or are being computed for others already."""

    def __init__(
        self, request: InferenceRequest, inputs: EmbeddingInputs, client: str, record: Record, now: float
    ) -> None:
        super().__init__(request, inputs, client, record, now)
        self._data = [{}] * len(inputs.items)
        self._awaited: list[Part] = []

    def knows(self, known: dict[int, Computed]) -> None:
        """The vectors of these places are known."""
        for place, (entry, tokens, exact) in known.items():
            self._data[place] = entry
            self._tokens += tokens
            self._exact = self._exact and exact

    def served(self, document: dict[str, Any]) -> Served:
        """The answer, when all is known. `document` is the rest of it."""
        return Served(document, self._data, self._tokens, self._exact)

    def awaits(self, part: Part, wanted: list[Wanted]) -> None:
        """These inputs come with a part that has a source."""
        source: Source = part.owner
        self._awaited.append(part)
        self._to_answer += 1
        self._to_take += not source.is_taken
        source.joined_by(self, wanted)

    def receives(
        self, document: dict[str, Any], computed: Sequence[Computed], wanted: list[Wanted], *, exact: bool
    ) -> None:
        """A source has its vectors. `exact`: their tokens are together, if not one by one."""
        if self.outcome.done():
            return
        each_once = len(wanted) == len(computed) and all(len(places) == 1 for _, places in wanted)
        for at, places in wanted:
            entry, tokens, is_exact = computed[at]
            self._tokens += tokens * len(places)
            self._exact = self._exact and (exact if each_once else is_exact)
            for place in places:
                self._data[place] = entry
        self._to_answer -= 1
        if not self._to_answer:
            self.ends(self.served(document))

    def leaves(self) -> list[Part]:
        """Only what nobody else waits for may be given up."""
        self.parts = []
        awaited, self._awaited = self._awaited, []
        return [part for part in awaited if part.owner.left_by(self)]


class Source:
    """What comes of one part, told to all who wait for an input of it. `on_end` hears its vectors, or of none."""

    def __init__(
        self,
        first: Sharer,
        inputs: EmbeddingInputs,
        keys: list[bytes],
        weights: Sequence[int],
        on_end: "Callable[[Source, Sequence[Computed], dict[str, Any]], None]",
    ) -> None:
        self.request = first.request
        self.inputs = inputs
        self.keys = keys
        self.whole = len(keys) == len(inputs.items)
        self.is_taken = False
        self._until: float | None = None
        self._weights = weights
        self._on_end = on_end
        self._since = first.joined_seconds
        self._sharers: dict[Sharer, list[Wanted]] = {}

    def __repr__(self) -> str:
        return f"<Source of {len(self.keys)} inputs, {len(self._sharers)} requests wait>"

    @property
    def as_it_came(self) -> bool:
        """Never: the vectors must be read."""
        return False

    @property
    def deadline_seconds(self) -> float | None:
        """When nobody wants it any more."""
        deadlines = [sharer.deadline_seconds for sharer in self._sharers]
        return None if None in deadlines else max((at for at in deadlines if at is not None), default=None)

    def joined_by(self, sharer: Sharer, wanted: list[Wanted]) -> None:
        """One more waits for inputs of it."""
        self._sharers[sharer] = wanted

    def left_by(self, sharer: Sharer) -> bool:
        """One does not wait any more. True = nobody does."""
        del self._sharers[sharer]
        if not self._sharers:
            self._on_end(self, (), {})
        return not self._sharers

    # What batches tell of it.

    def taken(self) -> None:
        """It is in a batch now."""
        self.is_taken, self._until = True, self.deadline_seconds
        for sharer in self._sharers:
            sharer.taken()

    def sent(self, record: Record, waited_seconds: float) -> None:
        """What is known of the batch. Who came later has waited for less."""
        for sharer in self._sharers:
            sharer.sent(record, waited_seconds - max(0.0, sharer.joined_seconds - self._since))

    def answered(self, part: Part, vectors: Vectors, offset: int, tokens: int, *, exact: bool) -> None:
        """It has its vectors, which begin at `offset`."""
        within = slice(offset, offset + part.items)
        counted = self._weights if self.inputs.are_ids else vectors.counts and vectors.counts[within]
        one_by_one = exact and (part.items == 1 or (counted is not None and sum(counted) == tokens))
        computed = [
            Computed(entry, share, one_by_one)
            for entry, share in zip(vectors.data[within], shares(tokens, counted or self._weights), strict=True)
        ]
        self._on_end(self, computed, vectors.document)
        for sharer, wanted in self._sharers.items():
            sharer.receives(vectors.document, computed, wanted, exact=exact)

    def ends(self, outcome: Outcome) -> None:
        """A backend refused the batch: everybody asks for themselves, but who asked for just this has the answer."""
        self._on_end(self, (), {})
        for sharer in self._sharers:
            own = isinstance(outcome, Refused) and self._is_all_of(sharer)
            sharer.ends(outcome if own else ByItself(isolated=True))

    def failed(self, error: GatewayError) -> None:
        """It cannot be answered. A backend's words may quote inputs of others; a deadline may be that of others."""
        self._on_end(self, (), {})
        others = copy(error)
        if isinstance(others, BackendError):
            others.answer = None
        for sharer in self._sharers:
            if isinstance(error, DeadlineUnmeetable) and self._has_time_left(sharer):
                sharer.ends(ByItself(isolated=True))
            else:
                own = sharer.request is self.request or self._is_all_of(sharer)
                sharer.failed(error if own else others)

    def _is_all_of(self, sharer: Sharer) -> bool:
        return self.whole and self.inputs.items == sharer.inputs.items

    def _has_time_left(self, sharer: Sharer) -> bool:
        deadline = sharer.deadline_seconds
        return self._until is not None and (deadline is None or deadline > self._until)
