"""Families: prompts that go apart early and have much text in common behind that place.

The prompts are a tree of pieces. Where it branches in three or more, the branches are compared: those that share text,
in whatever order and place, are a family, and what half of its branches have is its core. Conversations of one
application branch as well, behind the system prompt, but have no text in common there.

Branches are looked at from the root outward, and a prompt belongs to the first family that gains enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gateway.insights.corpus import Breathe, Corpus, Ints, chained, distinct, sums

LEAST_SAVING_BYTES = 512  # of a request, on average; below that a cause is not worth a look
LEAST_SAVING_SHARE = 0.05  # of the family's text
LEAST_SAMPLES = 4
LEAST_BRANCHES = 3
_MOST_PIECES = 4_000_000  # looked at in all: prompts made to branch everywhere would take minutes
_CORE_SHARE = 0.5  # of the branches that must have a piece
_MOST_VARYING = 4  # times the core, that what stands before its end may be
_COVERED = 0.95  # of a prompt's core bytes: behind that, a piece of the core is considered chance


@dataclass(frozen=True, slots=True)
class Family:
    """Samples that share their text up to `depth_bytes`, and then their core. Values are by member.

    `core_end` is the row of the corpus where the core ends; `saving_bytes` what a cache could have given besides.
    """

    depth_bytes: int
    members: Ints
    branches: Ints
    first_row: Ints  # where the member leaves the common way
    core_end: Ints
    core_bytes: Ints
    saving_bytes: Ints
    saving_share: float  # of all text of the members
    is_core: Ints  # sorted contents

    @property
    def mean_saving_bytes(self) -> float:
        """Of a request that is not the first."""
        return float(self.saving_bytes[1:].mean())


@dataclass(frozen=True, slots=True)
class _Branching:
    """Where the tree of prompts branches, and the samples that go through; rows are those right behind it."""

    rows: Ints
    members: Ints
    branches: Ints


def find_families(corpus: Corpus, hit_bytes: Ints, breathe: Breathe) -> list[Family]:
    """Every family. `hit_bytes`: of each sample, how much of it was found in a cache."""
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
    if family.mean_saving_bytes < LEAST_SAVING_BYTES or family.saving_share < LEAST_SAVING_SHARE:
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
    family = _clustered(branch, content, size, holders, count, breathe)
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
    """The family of these members, oldest first, with its core and what it could save."""
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
    core_end = _ends(corpus, rows, places, in_core, core_bytes)
    in_core &= rows < core_end[places]
    core_bytes = sums(places[in_core], corpus.size[rows[in_core]], len(members))
    depth = int(corpus.start[first_row[0]])
    beyond = np.maximum(0, hit_bytes[members] - depth)
    saving = core_bytes + _tails(corpus, members, core_end) - beyond
    saving = np.maximum(0, saving)
    saving[0] = 0  # nothing was before it
    last = corpus.rows[members + 1] - 1
    share = float(saving.sum() / (corpus.start[last] + corpus.size[last]).sum())
    return Family(depth, members, group.branches, first_row, core_end, core_bytes, saving, share, core)


def _core(corpus: Corpus, group: _Branching, rows: Ints, places: Ints) -> Ints:
    """The distinctive pieces that half of the branches have."""
    rows, places = _distinctive(corpus, rows, places)
    width = len(corpus.digest)
    pairs = distinct(group.branches[places] * width + corpus.content[rows])
    content, holders = np.unique(pairs % width, return_counts=True)
    return content[holders >= max(2, _CORE_SHARE * (int(group.branches.max()) + 1))]


def core_flags(corpus: Corpus, core: Ints, rows: Ints, places: Ints) -> npt.NDArray[np.bool_]:
    """Which pieces are of the core; short ones are if the one before is."""
    content = corpus.content[rows]
    known = np.isin(content, core)
    decided = corpus.distinctive[content]
    decided[np.flatnonzero(np.diff(places, prepend=-1))] = True  # each member's first
    last = np.maximum.accumulate(np.where(decided, np.arange(len(rows)), 0))
    answer: npt.NDArray[np.bool_] = known[last]
    return answer


def _ends(corpus: Corpus, rows: Ints, places: Ints, in_core: npt.NDArray[np.bool_], core_bytes: Ints) -> Ints:
    """For each member, the row where its core ends: nearly all of it is covered, and something else comes."""
    covered = np.cumsum(np.where(in_core, corpus.size[rows], 0)) - (np.cumsum(core_bytes) - core_bytes)[places]
    over = (covered >= _COVERED * core_bytes[places]) & ~in_core
    ends = corpus.rows[corpus.owner[rows[np.flatnonzero(np.diff(places, prepend=-1))]] + 1]
    np.minimum.at(ends, places[over], rows[over])
    return ends


def _tails(corpus: Corpus, members: Ints, core_end: Ints) -> Ints:
    """For each member, the bytes behind the core that follow it in an older member, too."""
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
