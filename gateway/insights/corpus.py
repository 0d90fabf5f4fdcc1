"""The sampled prompts as arrays: cut into pieces, the same text the same number, wherever it stands.

A piece ends at a line's end, a stop, a comma, a bracket or a backslash, so that a cut depends on the text beside it
alone: text that follows a difference is cut as it would be without it. Two pieces have the same `content` if they say
the same, and the same `node` if all that stands before them is the same, too, which is when a KV cache can be used.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from gateway.insights.samples import Sample

Ints = npt.NDArray[np.int64]
Breathe = Callable[[], None]  # called often, so that a long computation can let others run

_ENDS = b"\n.,;{}[]\\\x1e\x82\x8c"  # the last two end the comma and the full stop of Chinese and Japanese
_PIECE = re.compile(rb"[^" + re.escape(_ENDS) + rb"]{0,128}[" + re.escape(_ENDS) + rb"]*")
_MARGIN = _ENDS + b' ":\t\r'
_MOST_PIECES = 4096  # of a prompt: what follows is left out
_MOST_IN_ALL = 400_000  # of all prompts: the oldest are left out
_DISTINCTIVE_BYTES = 12  # shorter pieces are in every prompt
_ODD = 0x9E3779B97F4A7C15  # its powers number the places in a chain


@dataclass(frozen=True, slots=True)
class Corpus:
    """All samples' pieces, one after the other, oldest sample first. `rows[s]` to `rows[s + 1]` are those of sample s.

    Piece 0 of each sample is not text but stands for its model and cache salt.
    """

    samples: Sequence[Sample]
    rows: Ints
    owner: Ints  # the sample that a piece belongs to
    content: Ints
    node: Ints
    parent: Ints  # the node before; below 0 before the first piece
    start: Ints  # bytes
    size: Ints  # bytes
    distinctive: npt.NDArray[np.bool_]  # by content: long enough not to be in every prompt
    digest: npt.NDArray[np.uint64]  # by content

    def matched(self) -> Ints:
        """For each sample, the bytes that it begins with as an older one does."""
        first = np.full(int(self.node.max(initial=-1)) + 1, len(self.samples), np.int64)
        np.minimum.at(first, self.node, self.owner)
        old = first[self.node] < self.owner
        return sums(self.owner[old], self.size[old], len(self.samples))


def sums(places: Ints, values: Ints, length: int) -> Ints:
    return np.bincount(places, values, length).astype(np.int64)


def distinct(values: Ints) -> Ints:
    """Each value once, in order. Sorting, unlike np.unique's hashing, lets other threads run."""
    ordered = np.sort(values)
    answer: Ints = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(ordered)]]
    return answer


def chained(digests: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """For each piece a number that stands for it and all before it."""
    odds = np.full(len(digests), _ODD, np.uint64)
    return np.cumsum((digests + np.uint64(1)) * np.cumprod(odds), dtype=np.uint64) + np.uint64(seed)


def build(samples: Sequence[Sample], breathe: Breathe) -> Corpus:
    """Cut the samples into pieces and number them; if there are too many pieces, the oldest samples are left out."""
    cut, count = [], 0
    for sample in reversed(samples):
        pieces = _PIECE.findall(sample.text)[:-1][:_MOST_PIECES]  # the last one is empty
        count += len(pieces)
        if count > _MOST_IN_ALL:
            break
        cut.append(pieces)
        breathe()
    samples = samples[len(samples) - len(cut) :]
    digests, sizes, nodes, starts, lengths = [], [], [], [], []
    for sample, pieces, salt in zip(samples, reversed(cut), _salts(samples), strict=True):
        digest = np.array([salt, *(xxh3_64_intdigest(piece.strip(_MARGIN)) for piece in pieces)], np.uint64)
        size = np.array([0, *map(len, pieces)], np.int64)
        digests.append(digest)
        sizes.append(size)
        starts.append(np.cumsum(size) - size)
        nodes.append(chained(digest, xxh3_64_intdigest(sample.model.encode())))
        lengths.append(len(digest))
        breathe()
    rows = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    owner = np.repeat(np.arange(len(samples)), lengths)
    digest_of, content = np.unique(np.concatenate(digests), return_inverse=True)
    breathe()
    _, node = np.unique(np.concatenate(nodes), return_inverse=True)
    breathe()
    parent = np.concatenate(([0], node[:-1])).astype(np.int64)
    models = {name: number for number, name in enumerate(sorted({sample.model for sample in samples}), start=1)}
    parent[rows[:-1]] = [-models[sample.model] for sample in samples]
    size = np.concatenate(sizes)
    longest = np.zeros(len(digest_of), np.int64)
    np.maximum.at(longest, content, size)
    distinctive = longest >= _DISTINCTIVE_BYTES
    return Corpus(samples, rows, owner, content, node, parent, np.concatenate(starts), size, distinctive, digest_of)


def _salts(samples: Sequence[Sample]) -> list[int]:
    """A number for each sample: 0, or another where the same first block has another key, as with another salt."""
    known: dict[tuple[str, bytes], dict[int, int]] = {}
    salts = []
    for sample in samples:
        if not sample.keys or not sample.edges or sample.edges[0] > len(sample.text):
            salts.append(0)
            continue
        keys = known.setdefault((sample.model, sample.text[: sample.edges[0]]), {})
        salts.append(keys.setdefault(sample.keys[0], len(keys)))
    return salts
