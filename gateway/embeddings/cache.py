"""A bounded cache of embeddings: inputs whose embeddings it holds are not sent to a backend again.

Keys are digests of everything that decides an embedding. Clients choose the inputs, and a client that finds two inputs
with the same digest could give others a wrong embedding: so the digest is a cryptographic one, with a secret.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from hashlib import blake2b
from sys import getsizeof
from typing import Any

import orjson

from gateway.backends.backend import Backend
from gateway.backends.fleet import Fleet
from gateway.config import Config
from gateway.embeddings.metrics import EmbeddingMetrics
from gateway.embeddings.waiter import EmbeddingWaiter, Part, Piece
from gateway.embeddings.wire import Vectors, is_sound, shares
from gateway.observe.record import Record
from gateway.request import EmbeddingInputs, InferenceRequest

# Memory of an entry besides its value: a key of 16 bytes, a pair, a link of the list, and places in two tables, of
# which up to five of six are empty; measured for 300 to 300,000 entries.
ENTRY_BYTES = 368
_KEY_BYTES = 16
_TRIMMED = 2048  # entries at once, in a few milliseconds
_CACHED_BYTES = 112  # memory of an input's entry besides its vector
_FIELDS = ["index", "object", "embedding"]
# Of an input: its vector in base64, its tokens, whether these are exact, in a tuple that is cheap for the garbage
# collector. And of an answer: all but the vectors.
_Entry = tuple[str, int, bool] | bytes


class Revisions:
    """Identifies the state of a model: its cards, and the restarts of all backends that ever served it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._served_by: dict[str, set[Backend]] = {}
        self._restarts: dict[str, int] = {}  # by model

    def restarted(self, backend: Backend) -> None:
        """A new process may serve other weights under the same names."""
        for model, backends in self._served_by.items():
            if backend in backends:
                self._restarts[model] = self._restarts.get(model, 0) + 1

    def left(self, backend: Backend) -> None:
        for backends in self._served_by.values():
            backends.discard(backend)

    def of(self, model: str) -> bytes:
        """The state of a model. Names that no backend has listed are not remembered."""
        cards = set()
        for backend in self._fleet.backends:
            for card in backend.facts.models:
                if card.id == model:
                    self._served_by.setdefault(model, set()).add(backend)
                    cards.add((card.root or "", card.parent or "", card.max_model_len or 0))
        return repr((sorted(cards), self._restarts.get(model, 0))).encode()


@dataclass(eq=False, repr=False)
class EmbeddingCache:
    """Owner of the embeddings used last, of the models that it `is_on` for; `revision` identifies a model's state.

    A cache that is to become smaller sinks to that size step by step, by `trim`.
    """

    max_bytes: int
    _: KW_ONLY
    is_on: Callable[[str], bool]
    revision: Callable[[str], bytes]
    metrics: EmbeddingMetrics
    secret: bytes
    used_bytes: int = 0
    _entries: OrderedDict[bytes, tuple[int, _Entry]] = field(default_factory=OrderedDict)
    _wanted_bytes: int | None = None  # while it sinks to that; else None

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<EmbeddingCache {len(self)} entries, {self.used_bytes} of {self.max_bytes} bytes>"

    def follow(self, config: Config) -> None:
        """Take over another size, and other models that it is on for."""
        wanted = config.embeddings.cache_bytes
        self.is_on = partial(_is_cached, config)
        self._wanted_bytes = wanted if wanted < self.used_bytes else None
        self.max_bytes = max(wanted, self.used_bytes)

    def trim(self) -> None:
        """Come closer to the wanted size; to be called now and then."""
        wanted = self._wanted_bytes
        if wanted is None:
            return
        for _ in range(_TRIMMED):
            if self.used_bytes <= wanted:
                self._wanted_bytes = None
                break
            self._evict()
        self.max_bytes = max(wanted, self.used_bytes)

    def get(self, key: bytes) -> _Entry | None:
        """The entry, marked as used now."""
        if (entry := self._entries.get(key)) is None:
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, key: bytes, entry: _Entry, size_bytes: int) -> None:
        """Keep an entry of this size, unless it is larger than the cache."""
        size = size_bytes + ENTRY_BYTES
        self.used_bytes -= self._entries.pop(key, (0, entry))[0]
        if size > self.max_bytes:
            return
        self._entries[key] = (size, entry)
        self.used_bytes += size
        while self.used_bytes > self.max_bytes:
            self._evict()

    def _evict(self) -> None:
        _, (gone, _) = self._entries.popitem(last=False)
        self.used_bytes -= gone
        self.metrics.evictions.add(())

    def keys_of(self, model: str, inputs: EmbeddingInputs) -> Iterator[bytes]:
        """A digest of each input with all that decides its vector; and last, the key of the answer's other fields."""
        base = blake2b(key=self.secret, digest_size=_KEY_BYTES)
        for part in (inputs.template, self.revision(model), b"%d" % inputs.are_ids):
            base.update(b"%d:%b" % (len(part), part))
        for item in inputs.items:
            digest = base.copy()
            digest.update(item.encode() if type(item) is str else array("i", item).tobytes())
            yield digest.digest()
        yield b"head" + base.digest()


class CachedWaiter(EmbeddingWaiter):
    """A request that sends its missing inputs only, and adds their embeddings to the cache.

    `missing`: the places of its inputs without an entry; `document`: the rest of the answer, if none is missing.
    """

    def __init__(
        self, cache: EmbeddingCache, request: InferenceRequest, client: str, record: Record, now: float
    ) -> None:
        inputs = request.inputs
        assert inputs is not None
        *keys, head_key = cache.keys_of(request.demand.model, inputs)
        found = {place: entry for place, key in enumerate(keys) if type(entry := cache.get(key)) is tuple}
        head = cache.get(head_key) if found else None  # after its vectors, so that it is evicted after them
        self.document = orjson.loads(head) if type(head) is bytes and len(found) == len(keys) else None
        if self.document is None and len(found) == len(keys):
            found = {}
        self.missing = [place for place in range(len(keys)) if place not in found]
        super().__init__(request, inputs.only(self.missing), client, record=record, now=now)
        self.passes_unread = False
        self._cache, self._keys, self._head_key, self._cached = cache, keys, head_key, found
        self._estimates: Sequence[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self.sends_a_part = not self.whole or len(self._cached) > 0
        self._estimates = tokens
        self.record.reused(len(self._cached))
        for source, inputs in (("cached", len(self._cached)), ("computed", len(self.missing))):
            if inputs:
                self._cache.metrics.inputs.add((self.request.demand.model, source), inputs)

    def vectors(self, parts: list[Vectors]) -> Vectors:
        new = super().vectors(parts)
        data: list[dict[str, Any]] = [{}] * len(self._keys)
        for place, entry in zip(self.missing, new.data, strict=True):
            data[place] = entry
        tokens, exact = new.prompt_tokens, new.exact
        for place, (vector, its_tokens, is_exact) in self._cached.items():
            data[place] = {"index": place, "object": "embedding", "embedding": vector}
            tokens, exact = tokens + its_tokens, exact and is_exact
        return Vectors(new.form, data, tokens, exact=exact)

    def answered(self, piece: Piece, part: Part) -> None:
        assert isinstance(part, Vectors)
        within = slice(piece.start, piece.start + piece.items)
        counts = self._estimates[within] if self.inputs.are_ids else part.counts
        one_by_one = part.exact and (piece.items == 1 or (counts is not None and sum(counts) == part.prompt_tokens))
        each = shares(part.prompt_tokens, counts or self._estimates[within])
        for place, entry, its_tokens in zip(self.missing[within], part.data, each, strict=True):
            vector = entry["embedding"]
            if list(entry) == _FIELDS and entry["object"] == "embedding" and is_sound(vector):
                size_bytes = getsizeof(vector) + _CACHED_BYTES
                self._cache.put(self._keys[place], (vector, its_tokens, one_by_one), size_bytes)
        if self._cache.get(self._head_key) is None:
            head = orjson.dumps({**part.form.document, "data": None})
            self._cache.put(self._head_key, head, getsizeof(head))
        super().answered(piece, part)


def configured_cache(config: Config, fleet: Fleet, metrics: EmbeddingMetrics, secret: bytes) -> EmbeddingCache:
    """A cache of the configured size; of no size, it is on for no model."""
    revisions = Revisions(fleet)
    fleet.on_restart.append(revisions.restarted)
    fleet.on_leave.append(revisions.left)
    is_on = partial(_is_cached, config)
    return EmbeddingCache(
        config.embeddings.cache_bytes, is_on=is_on, revision=revisions.of, metrics=metrics, secret=secret
    )


def _is_cached(config: Config, model: str) -> bool:
    return config.embeddings.cache_bytes > 0 and config.embeds("cache", model)
