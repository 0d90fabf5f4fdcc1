"""Inputs whose vectors are known, or are being computed for somebody else, are not computed again."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from sys import getsizeof
from typing import Any

import orjson

from gateway.backends.registry import Fleet
from gateway.config import Config
from gateway.embeddings.cache import ByteLru
from gateway.embeddings.member import Served
from gateway.embeddings.part import Part
from gateway.embeddings.revision import Revisions
from gateway.embeddings.sharing import Computed, Sharer, Source, Wanted
from gateway.embeddings.vectors import is_sound
from gateway.observe.embeddings import EmbeddingMetrics
from gateway.request import EmbeddingInputs

_KEY_BYTES = 16
_KNOWN_BYTES = 112  # of an entry's pair of vector and tokens, and of the number
_FIELDS = ["index", "object", "embedding"]
_Known = tuple[str, int, bool]  # vector in base64, tokens, whether these are exact: cheap for the garbage collector
_Lane = tuple[bool, bool]  # class batch, bulk: the short ones do not wait behind the long


@dataclass(slots=True)
class Found:
    """What is known of a request's inputs. `rest` are the places of the others, each with those of the same input."""

    keys: list[bytes]
    head_key: bytes
    known: dict[int, Computed]
    rest: list[list[int]]
    document: dict[str, Any] | None  # the rest of the answer, if nothing is missing
    shares: bool
    keeps: bool


class Reuse:
    """Owner of the vectors that are kept, and of who computes what just now.

    Keys are digests of everything that decides a vector. Clients choose the inputs, and one who found two with the same
    digest could give others a wrong vector: so it is a cryptographic one, with a secret.
    """

    def __init__(
        self,
        max_bytes: int,
        caches: Callable[[str], bool],
        deduplicates: Callable[[str], bool],
        revision: Callable[[str], bytes],
        metrics: EmbeddingMetrics,
        secret: bytes,
    ) -> None:
        self.cache: ByteLru[_Known | bytes] = ByteLru(max_bytes)
        self._caches = caches
        self._deduplicates = deduplicates
        self._revision = revision
        self._metrics = metrics
        self._secret = secret
        self._coming: dict[tuple[bytes, _Lane], tuple[Part, int]] = {}

    def __repr__(self) -> str:
        return f"<Reuse {self.cache!r}, {len(self._coming)} inputs coming>"

    @property
    def coming(self) -> int:
        """Inputs that are being computed, and may be shared."""
        return len(self._coming)

    def find(self, model: str, inputs: EmbeddingInputs) -> Found | None:
        """What is known of these inputs; None = this model's are neither kept nor shared."""
        caches, shares = self.cache.max_bytes > 0 and self._caches(model), self._deduplicates(model)
        if not (caches or shares):
            return None
        keys = list(self._keys(model, inputs))
        head_key = keys.pop()
        known: dict[int, Computed] = {}
        if caches:
            for place, key in enumerate(keys):
                kept = self.cache.get(key)
                if type(kept) is tuple:
                    known[place] = _computed(place, kept)
        rest = _places(keys, known, merge=shares)
        document = None
        if known:
            head = self.cache.get(head_key)  # after its vectors, so that it is never forgotten before them
            document = orjson.loads(head) if type(head) is bytes and not rest else None
            if document is None and not rest:
                known, rest = {}, _places(keys, {}, merge=shares)
        return Found(keys, head_key, known, rest, document, shares, caches)

    def complete(self, sharer: Sharer, found: Found, document: dict[str, Any]) -> Served:
        """The answer to a request of which nothing is missing."""
        self._count(sharer, found, 0)
        return sharer.served(document)

    def begin(
        self,
        sharer: Sharer,
        found: Found,
        tokens: Sequence[int],
        cut: Callable[[EmbeddingInputs, list[int]], list[Part]],
        *,
        bulk: bool,
    ) -> None:
        """Let the request wait for what is missing: for what is coming, and for what `cut` makes of the others."""
        lane, keys = (sharer.request.ask.batch, bulk), found.keys
        wanted: dict[Part, list[Wanted]] = {}
        new: list[list[int]] = []
        for places in found.rest:
            coming = self._coming.get((keys[places[0]], lane)) if found.shares else None
            if coming is None:
                new.append(places)
            else:
                wanted.setdefault(coming[0], []).append(Wanted(coming[1], places))
        for part, each in wanted.items():
            sharer.awaits(part, each)
        if new:
            firsts = [places[0] for places in new]
            inputs, own = sharer.inputs.only(firsts), [tokens[place] for place in firsts]
            self._compute(sharer, found, new, cut(inputs, own), inputs, own, lane)
        self._count(sharer, found, len(new))

    def _compute(
        self,
        sharer: Sharer,
        found: Found,
        new: list[list[int]],
        parts: list[Part],
        inputs: EmbeddingInputs,
        tokens: list[int],
        lane: _Lane,
    ) -> None:
        head_key = found.head_key if found.keeps else b""

        def ended(source: Source, computed: Sequence[Computed], document: dict[str, Any]) -> None:
            for key in source.keys:
                coming = self._coming.get((key, lane))
                if coming is not None and coming[0].owner is source:
                    del self._coming[(key, lane)]
            if computed and head_key:
                self._keep(head_key, source.keys, computed, document)

        sharer.parts = parts
        for part in parts:
            within = slice(part.start, part.start + part.items)
            keys = [found.keys[places[0]] for places in new[within]]
            part.owner = Source(sharer, inputs, keys, tokens[within], ended)
            sharer.awaits(part, [Wanted(at, places) for at, places in enumerate(new[within])])
            if found.shares:
                self._coming.update(((key, lane), (part, at)) for at, key in enumerate(keys))

    def _count(self, sharer: Sharer, found: Found, computed: int) -> None:
        """Take over what is known, and count."""
        sharer.knows(found.known)
        cached, count = len(found.known), len(found.keys)
        model, counter = sharer.request.ask.model, self._metrics.inputs
        for source, inputs in (("cached", cached), ("shared", count - cached - computed), ("computed", computed)):
            if inputs:
                counter.add((model, source), inputs)
        sharer.record.reused_inputs = count - computed

    def _keep(self, head_key: bytes, keys: list[bytes], computed: Sequence[Computed], document: dict[str, Any]) -> None:
        evictions = self.cache.evictions
        for key, (entry, tokens, exact) in zip(keys, computed, strict=True):
            vector = entry["embedding"]
            if list(entry) == _FIELDS and entry["object"] == "embedding" and is_sound(vector):
                self.cache.put(key, (vector, tokens, exact), getsizeof(vector) + _KNOWN_BYTES)
        if self.cache.get(head_key) is None:
            head = orjson.dumps({**document, "data": None})
            self.cache.put(head_key, head, getsizeof(head))
        if self.cache.evictions > evictions:
            self._metrics.evictions.add((), self.cache.evictions - evictions)

    def _keys(self, model: str, inputs: EmbeddingInputs) -> Iterator[bytes]:
        """A digest of each input with all that decides its vector; and last, one of the latter alone."""
        base = blake2b(key=self._secret, digest_size=_KEY_BYTES)
        for field in (inputs.template, self._revision(model), inputs.isolation.encode(), b"%d" % inputs.are_ids):
            base.update(b"%d:%b" % (len(field), field))
        for item in inputs.items:
            digest = base.copy()
            digest.update(item.encode() if type(item) is str else array("i", item).tobytes())
            yield digest.digest()
        yield b"head" + base.digest()


def reuse_as_configured(config: Config, fleet: Fleet, metrics: EmbeddingMetrics, secret: bytes) -> Reuse | None:
    """What the configuration asks for; None = it asks for nothing of the kind."""
    common, models = config.embeddings, config.models.by_name.values()
    if not (common.cache_bytes or common.deduplicate or any(each.embeddings.deduplicate for each in models)):
        return None
    revisions = Revisions(fleet)
    fleet.on_restart.append(revisions.restarted)
    caches, deduplicates = partial(config.embeds, "cache"), partial(config.embeds, "deduplicate")
    return Reuse(common.cache_bytes, caches, deduplicates, revisions.of, metrics, secret)


def _places(keys: list[bytes], known: dict[int, Computed], *, merge: bool) -> list[list[int]]:
    """The places of what is not known, those of the same input together."""
    missing = [place for place in range(len(keys)) if place not in known]
    if not merge:
        return [[place] for place in missing]
    by_key: dict[bytes, list[int]] = {}
    for place in missing:
        by_key.setdefault(keys[place], []).append(place)
    return list(by_key.values())


def _computed(place: int, known: _Known) -> Computed:
    vector, tokens, exact = known
    return Computed({"index": place, "object": "embedding", "embedding": vector}, tokens, exact)
