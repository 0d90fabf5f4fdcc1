"""The sampled prompts as arrays of pieces, and families of them: prompts that differ early and share text after it.

A piece ends at a line's end, a stop, a comma, a bracket or a backslash, so that a cut depends only on the adjacent
text: a difference does not change the cuts after it. Two pieces have the same `content` if their text is equal, and the
same `node` if all text before them is equal as well, which is when a KV cache can be used.

The prompts are a tree of pieces. Where it branches in three or more, the branches are compared: branches that share
text, in whatever order and place, are a family, and the text of at least half of its branches is its core.
Conversations of one application branch as well, behind the system prompt, but have no text in common there. Branches
are visited from the root outward, and a prompt belongs to the first family that gains enough.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from gateway.features.insights.samples import Sample

Ints = npt.NDArray[np.int64]
Breathe = Callable[[], None]  # called often, so that a long computation can let others run

_ENDS = b"\n.,;{}[]\\\x1e\x82\x8c"  # the last two end the comma and the full stop of Chinese and Japanese
_PIECE = re.compile(rb"[^" + re.escape(_ENDS) + rb"]{0,128}[" + re.escape(_ENDS) + rb"]*")
_MARGIN = _ENDS + b' ":\t\r'
MOST_PIECES_OF_A_PROMPT = 4096  # pieces after that are ignored
_MOST_IN_ALL = 400_000  # of all prompts: the oldest are ignored
_DISTINCTIVE_BYTES = 12  # shorter pieces are in every prompt
_ODD = 0x9E3779B97F4A7C15  # its powers number the places in a chain

LEAST_SAVING_BYTES = 512  # of a request, on average; below that a cause is not worth a look
LEAST_SAVING_SHARE = 0.05  # of the family's text
LEAST_SAMPLES = 4
LEAST_BRANCHES = 3
_MOST_PIECES = 4_000_000  # in total: prompts made to branch everywhere would take minutes
_CORE_SHARE = 0.5  # of the branches that must have a piece
_MOST_VARYING = 4  # the largest ratio of varying text before the core's end to the core
_COVERED = 0.95  # of a prompt's core bytes: behind that, a core piece is considered chance


@dataclass(frozen=True, slots=True)
class Corpus:
    """All samples' pieces, concatenated, oldest sample first. `rows[s]` to `rows[s + 1]` are the pieces of sample s.

    Piece 0 of each sample is not text but stands for its model and cache salt.
    """

    samples: Sequence[Sample]
    _: KW_ONLY
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
        """For each sample, the bytes of its longest prefix shared with an older one."""
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
        pieces = _PIECE.findall(sample.text)[:-1][:MOST_PIECES_OF_A_PROMPT]  # the last one is empty
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
    return Corpus(
        samples,
        rows=rows,
        owner=owner,
        content=content,
        node=node,
        parent=parent,
        start=np.concatenate(starts),
        size=size,
        distinctive=distinctive,
        digest=digest_of,
    )


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


@dataclass(frozen=True, slots=True)
class Family:
    """Samples that share their text up to `first_row`, and then their core. Values are by member.

    `core_end` is the row of the corpus where the core ends; `saving_bytes` the additional possible cache hit.
    """

    members: Ints
    _: KW_ONLY
    branches: Ints
    first_row: Ints  # where the member leaves the shared prefix
    core_end: Ints
    core_bytes: Ints
    saving_bytes: Ints
    saving_share: float  # of all text of the members
    is_core: Ints  # sorted contents


@dataclass(frozen=True, slots=True)
class _Branching:
    """A node where the tree of prompts branches, and the samples that go through; rows are right behind it."""

    rows: Ints
    members: Ints
    branches: Ints


def find_families(corpus: Corpus, hit_bytes: Ints, breathe: Breathe) -> list[Family]:
    """Every family. `hit_bytes`: the bytes of each sample that were found in a cache."""
    claimed = np.zeros(len(corpus.samples), np.bool_)
    families = []
    left = _MOST_PIECES
    for branching in _branchings(corpus, claimed):
        left -= int((corpus.rows[branching.members + 1] - branching.rows).sum())
        if left < 0:
            break
        breathe()
        measured = (_measured(corpus, branching, chosen, hit_bytes) for chosen in _alike(corpus, branching, breathe))
        found = [family for family in measured if family is not None and _gains_enough(corpus, family)]
        for family in found:
            claimed[family.members] = True
        families += found
    return families


def _gains_enough(corpus: Corpus, family: Family) -> bool:
    of_others = family.saving_bytes[1:]  # the first member's are in no cache
    if of_others.mean() < LEAST_SAVING_BYTES or family.saving_share < LEAST_SAVING_SHARE:
        return False
    before_end = corpus.start[family.core_end - 1] - corpus.start[family.first_row]
    varying = np.median(before_end - family.core_bytes)
    return bool(varying <= _MOST_VARYING * np.median(family.core_bytes))


def _branchings(corpus: Corpus, claimed: npt.NDArray[np.bool_]) -> Iterator[_Branching]:
    """From the root outward; without the samples that belong to a family by then."""
    order = np.argsort(corpus.parent, kind="stable")
    parents = corpus.parent[order]
    starts = np.flatnonzero(np.concatenate(([True], parents[1:] != parents[:-1]))) if len(parents) else order
    ends = np.concatenate((starts[1:], [len(parents)]))
    wide = ends - starts >= max(LEAST_SAMPLES, LEAST_BRANCHES)
    groups = [order[start:end] for start, end in zip(starts[wide], ends[wide], strict=True)]
    groups.sort(key=lambda rows: int(corpus.start[rows[0]]))
    for every in groups:
        rows = every[~claimed[corpus.owner[every]]]
        if len(rows) < LEAST_SAMPLES:
            continue
        nodes, branches = np.unique(corpus.node[rows], return_inverse=True)
        if len(nodes) >= LEAST_BRANCHES:
            yield _Branching(rows, corpus.owner[rows], branches.astype(np.int64))


def _behind(corpus: Corpus, branching: _Branching) -> tuple[Ints, Ints]:
    """Every piece behind the branching: its row, and the place of its sample among the members."""
    lengths = corpus.rows[branching.members + 1] - branching.rows
    places = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return branching.rows[places] + offsets, places


def _distinctive(corpus: Corpus, rows: Ints, places: Ints) -> tuple[Ints, Ints]:
    chosen = corpus.distinctive[corpus.content[rows]]
    return rows[chosen], places[chosen]


def _alike(corpus: Corpus, branching: _Branching, breathe: Breathe) -> list[Ints]:
    """Members, as places in the branching, grouped by the text that their branches share."""
    rows, places = _behind(corpus, branching)
    rows, places = _distinctive(corpus, rows, places)
    count = int(branching.branches.max()) + 1
    content, width = corpus.content[rows], len(corpus.digest)
    pairs = distinct(branching.branches[places] * width + content)
    breathe()
    branch, content = pairs // width, pairs % width
    holders = np.bincount(content, minlength=width)
    shared = holders[content] >= LEAST_BRANCHES
    branch, content = branch[shared], content[shared]
    size = np.zeros(width, np.int64)
    size[corpus.content[rows]] = corpus.size[rows]
    if len(content) == 0 or sums(branch, size[content], count).max() < LEAST_SAVING_BYTES:
        return []
    family = _clustered(branch, content, size=size, holders=holders, count=count, breathe=breathe)
    groups = [np.flatnonzero(family[branching.branches] == number) for number in range(int(family.max()) + 1)]
    return [group for group in groups if len(group) >= LEAST_SAMPLES]


def _clustered(branch: Ints, content: Ints, size: Ints, holders: Ints, count: int, breathe: Breathe) -> Ints:
    """A family for each branch, -1 for none: that of the pieces that weigh most in it, if it is half of them."""
    starts = np.searchsorted(branch, np.arange(count + 1))
    owner = np.full(len(size), -1, np.int64)
    family = np.full(count, -1, np.int64)
    families = 0
    for number in range(count):
        pieces = content[starts[number] : starts[number + 1]]
        if size[pieces].sum() < LEAST_SAVING_BYTES:
            continue
        weights, owners = size[pieces] * holders[pieces], owner[pieces]
        known = owners >= 0
        votes = np.bincount(owners[known], weights[known], families + 1)
        best = int(votes.argmax())
        if votes[best] * 2 < weights.sum():
            best = families
            families += 1
        family[number] = best
        owner[pieces[~known]] = best
        breathe()
    return family


def _measured(corpus: Corpus, branching: _Branching, chosen: Ints, hit_bytes: Ints) -> Family | None:
    """The family of these members, oldest first, with its core and its possible savings."""
    chosen = chosen[np.argsort(branching.members[chosen], kind="stable")]
    first_row, members = branching.rows[chosen], branching.members[chosen]
    _, branches = np.unique(branching.branches[chosen], return_inverse=True)
    if int(branches.max()) + 1 < LEAST_BRANCHES:
        return None
    group = _Branching(first_row, members, branches.astype(np.int64))
    rows, places = _behind(corpus, group)
    core = _core(corpus, group, rows, places)
    in_core = core_flags(corpus, core, rows, places)
    core_bytes = sums(places[in_core], corpus.size[rows[in_core]], len(members))
    if not core_bytes.all():
        kept = chosen[core_bytes > 0]
        return _measured(corpus, branching, kept, hit_bytes) if len(kept) >= LEAST_SAMPLES else None
    core_end = _ends(corpus, rows, places, in_core=in_core, core_bytes=core_bytes)
    in_core &= rows < core_end[places]
    core_bytes = sums(places[in_core], corpus.size[rows[in_core]], len(members))
    beyond = np.maximum(0, hit_bytes[members] - corpus.start[first_row[0]])
    saving = np.maximum(0, core_bytes + _tails(corpus, members, core_end) - beyond)
    saving[0] = 0  # nothing was before it
    last = corpus.rows[members + 1] - 1
    share = float(saving.sum() / (corpus.start[last] + corpus.size[last]).sum())
    return Family(
        members,
        branches=group.branches,
        first_row=first_row,
        core_end=core_end,
        core_bytes=core_bytes,
        saving_bytes=saving,
        saving_share=share,
        is_core=core,
    )


def _core(corpus: Corpus, group: _Branching, rows: Ints, places: Ints) -> Ints:
    """The distinctive pieces that half of the branches have."""
    rows, places = _distinctive(corpus, rows, places)
    width = len(corpus.digest)
    pairs = distinct(group.branches[places] * width + corpus.content[rows])
    content, holders = np.unique(pairs % width, return_counts=True)
    return content[holders >= max(2, _CORE_SHARE * (int(group.branches.max()) + 1))]


def core_flags(corpus: Corpus, core: Ints, rows: Ints, places: Ints) -> npt.NDArray[np.bool_]:
    """Flags the pieces of the core; short ones belong to it if the piece before does."""
    content = corpus.content[rows]
    known = np.isin(content, core)
    decided = corpus.distinctive[content]
    decided[np.flatnonzero(np.diff(places, prepend=-1))] = True  # each member's first
    last = np.maximum.accumulate(np.where(decided, np.arange(len(rows)), 0))
    answer: npt.NDArray[np.bool_] = known[last]
    return answer


def _ends(corpus: Corpus, rows: Ints, places: Ints, in_core: npt.NDArray[np.bool_], core_bytes: Ints) -> Ints:
    """For each member, the row where its core ends: nearly all of it is covered, and other text follows."""
    covered = np.cumsum(np.where(in_core, corpus.size[rows], 0)) - (np.cumsum(core_bytes) - core_bytes)[places]
    over = (covered >= _COVERED * core_bytes[places]) & ~in_core
    ends = corpus.rows[corpus.owner[rows[np.flatnonzero(np.diff(places, prepend=-1))]] + 1]
    np.minimum.at(ends, places[over], rows[over])
    return ends


def _tails(corpus: Corpus, members: Ints, core_end: Ints) -> Ints:
    """For each member, the bytes behind the core that also follow it in an older member."""
    known: set[int] = set()
    matched = np.zeros(len(members), np.int64)
    for place, (start, end) in enumerate(zip(core_end, corpus.rows[members + 1], strict=True)):
        chain = chained(corpus.digest[corpus.content[start:end]], 0).tolist()
        depth = 0
        while depth < len(chain) and chain[depth] in known:
            depth += 1
        matched[place] = corpus.size[start : start + depth].sum()
        known.update(chain[depth:])
    return matched
