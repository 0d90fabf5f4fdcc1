"""A bounded cache of embeddings: inputs whose embeddings it holds are not sent to a backend again.

Keys are digests of everything that decides an embedding. Clients choose the inputs, and a client that finds two inputs
with the same digest could give others a wrong embedding: so the digest is a cryptographic one, with a secret.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from sys import getsizeof
from typing import Any, Generic, TypeVar

import orjson

from gateway.backends.backend import Backend
from gateway.backends.fleet import Fleet
from gateway.config import Config
from gateway.embeddings.delivery import BufferedResponse
from gateway.embeddings.fair_queue import Piece
from gateway.embeddings.waiter import Outcome, SendUnchanged, Waiter
from gateway.embeddings.wire import Vectors, is_sound, shares
from gateway.observe.metrics import EmbeddingMetrics
from gateway.observe.record import Record
from gateway.request import EmbeddingInputs, InferenceRequest

Value = TypeVar("Value")
# Memory of an entry besides its value: a key of 16 bytes, a pair, a link of the list, and places in two tables, of
# which up to five of six are empty; measured for 300 to 300,000 entries.
ENTRY_BYTES = 368
_KEY_BYTES = 16
_CACHED_BYTES = 112  # memory of a `_Cached` besides its vector
_FIELDS = ["index", "object", "embedding"]
_Cached = tuple[str, int, bool]  # vector in base64, tokens, whether these are exact: cheap for the garbage collector


class ByteLru(Generic[Value]):
    """A least-recently-used cache of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.evictions = 0
        self._entries: OrderedDict[bytes, tuple[int, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<ByteLru {len(self)} entries, {self.used_bytes} of {self.max_bytes} bytes>"

    def get(self, key: bytes) -> Value | None:
        """The value, marked as used now; None = a miss."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, key: bytes, value: Value, size_bytes: int) -> None:
        """Keep a value of this size, unless it is larger than the cache."""
        size = size_bytes + ENTRY_BYTES
        old = self._entries.pop(key, None)
        if old is not None:
            self.used_bytes -= old[0]
        if size > self.max_bytes:
            return
        self._entries[key] = (size, value)
        self.used_bytes += size
        while self.used_bytes > self.max_bytes:
            _, (gone, _) = self._entries.popitem(last=False)
            self.used_bytes -= gone
            self.evictions += 1


class Revisions:
    """Identifies the state of a model: its cards, and the restarts of its backends. Each restart makes a new state."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._served_by: dict[str, set[Backend]] = {}  # ever
        self._restarts: dict[Backend, int] = {}

    def restarted(self, backend: Backend) -> None:
        """A new process may serve other weights under the same names."""
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


class EmbeddingCache:
    """Owner of cached embeddings. `is_on`: whether a model is cached; `revision` identifies the model's state."""

    def __init__(
        self,
        max_bytes: int,
        is_on: Callable[[str], bool],
        revision: Callable[[str], bytes],
        metrics: EmbeddingMetrics,
        secret: bytes,
    ) -> None:
        self.entries: ByteLru[_Cached | bytes] = ByteLru(max_bytes)
        self.metrics = metrics
        self._is_on = is_on
        self._revision = revision
        self._secret = secret

    def __repr__(self) -> str:
        return f"<EmbeddingCache {self.entries!r}>"

    def find(self, model: str, inputs: EmbeddingInputs) -> "Lookup | None":
        """Look all inputs up; None = this model is not cached."""
        if not self._is_on(model):
            return None
        *keys, head_key = self._keys(model, inputs)
        cached: dict[int, _Cached] = {}
        for place, key in enumerate(keys):
            entry = self.entries.get(key)
            if type(entry) is tuple:
                cached[place] = entry
        missing = [place for place in range(len(keys)) if place not in cached]
        head = self.entries.get(head_key) if cached else None  # after its vectors, so that it is evicted after them
        document = orjson.loads(head) if type(head) is bytes and not missing else None
        if document is None and not missing:
            cached, missing = {}, list(range(len(keys)))
        return Lookup(self, inputs, keys, head_key, cached, missing, document)

    def keep(
        self, lookup: "Lookup", within: slice, vectors: Vectors, came: slice, tokens: list[int], *, exact: bool
    ) -> None:
        """Add the embeddings of some missing inputs. `exact`: `tokens` are each input's own, not shares of a sum."""
        evictions = self.entries.evictions
        for place, entry, its_tokens in zip(lookup.missing[within], vectors.data[came], tokens, strict=True):
            vector = entry["embedding"]
            if list(entry) == _FIELDS and entry["object"] == "embedding" and is_sound(vector):
                self.entries.put(lookup.keys[place], (vector, its_tokens, exact), getsizeof(vector) + _CACHED_BYTES)
        if self.entries.get(lookup.head_key) is None:
            head = orjson.dumps({**vectors.document, "data": None})
            self.entries.put(lookup.head_key, head, getsizeof(head))
        if self.entries.evictions > evictions:
            self.metrics.evictions.add((), self.entries.evictions - evictions)

    def _keys(self, model: str, inputs: EmbeddingInputs) -> Iterator[bytes]:
        """A digest of each input with all that decides its vector; and last, the key of the answer's other fields."""
        base = blake2b(key=self._secret, digest_size=_KEY_BYTES)
        for field in (inputs.template, self._revision(model), inputs.isolation.encode(), b"%d" % inputs.are_ids):
            base.update(b"%d:%b" % (len(field), field))
        for item in inputs.items:
            digest = base.copy()
            digest.update(item.encode() if type(item) is str else array("i", item).tobytes())
            yield digest.digest()
        yield b"head" + base.digest()


@dataclass(slots=True)
class Lookup:
    """The cache entries of a request. `missing` lists the places of the inputs without one."""

    cache: EmbeddingCache
    inputs: EmbeddingInputs
    keys: list[bytes]
    head_key: bytes
    cached: dict[int, _Cached]
    missing: list[int]
    document: dict[str, Any] | None  # the rest of the answer, if nothing is missing

    def waiter(
        self, request: InferenceRequest, client: str, record: Record, now: float, tokens: Sequence[int]
    ) -> "CachedWaiter":
        """Answer the request by way of the cache, and count its hits and misses. `tokens`: of each missing input."""
        record.reused(len(self.cached))
        for source, inputs in (("cached", len(self.cached)), ("computed", len(self.missing))):
            if inputs:
                self.cache.metrics.inputs.add((request.demand.model, source), inputs)
        return CachedWaiter(request, client, record, now, self, tokens)

    def completed(self, new: Vectors) -> Vectors:
        """The whole answer, from one that holds the missing inputs only."""
        data: list[dict[str, Any]] = [{}] * len(self.keys)
        for place, entry in zip(self.missing, new.data, strict=True):
            data[place] = entry
        tokens, exact = new.prompt_tokens, new.exact
        for place, (vector, its_tokens, is_exact) in self.cached.items():
            data[place] = {"index": place, "object": "embedding", "embedding": vector}
            tokens, exact = tokens + its_tokens, exact and is_exact
        return Vectors(new.document, data, tokens, exact=exact)


class CachedWaiter(Waiter):
    """A request that sends its missing inputs only, and adds their embeddings to the cache."""

    def __init__(
        self, request: InferenceRequest, client: str, record: Record, now: float, lookup: Lookup, tokens: Sequence[int]
    ) -> None:
        super().__init__(request, lookup.inputs.only(lookup.missing), client, record, now)
        self._lookup = lookup
        self._tokens_of_each = tokens

    @property
    def sendable_unchanged(self) -> bool:
        """Never: the embeddings must be read."""
        return False

    def answered(self, piece: Piece[Waiter], vectors: Vectors, offset: int, tokens: int, *, exact: bool) -> None:
        """One of its pieces has its vectors, which begin at `offset`."""
        lookup, within = self._lookup, slice(piece.start, piece.start + piece.items)
        came = slice(offset, offset + piece.items)
        counts = self._tokens_of_each[within] if self.inputs.are_ids else vectors.counts and vectors.counts[came]
        one_by_one = exact and (piece.items == 1 or (counts is not None and sum(counts) == tokens))
        each = shares(tokens, counts or self._tokens_of_each[within])
        lookup.cache.keep(lookup, within, vectors, came, each, exact=one_by_one)
        super().answered(piece, vectors, offset, tokens, exact=exact)

    def finish(self, outcome: Outcome) -> None:
        """Complete an answer. A refusal of only some of its inputs: the request is sent as it came."""
        if isinstance(outcome, Vectors):
            outcome = self._lookup.completed(outcome)
        elif isinstance(outcome, BufferedResponse) and (self._lookup.cached or not self.whole):
            outcome = SendUnchanged(isolated=True)
        super().finish(outcome)


def cache_as_configured(
    config: Config, fleet: Fleet, metrics: EmbeddingMetrics, secret: bytes
) -> EmbeddingCache | None:
    """The configured cache; None if it is off."""
    if not config.embeddings.cache_bytes:
        return None
    revisions = Revisions(fleet)
    fleet.on_restart.append(revisions.restarted)
    is_on = partial(config.embeds, "cache")
    return EmbeddingCache(config.embeddings.cache_bytes, is_on, revisions.of, metrics, secret)
