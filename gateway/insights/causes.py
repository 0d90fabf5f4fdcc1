"""Of a family, the cause: the one difference that most pairs of its prompts show first."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gateway.insights.corpus import Corpus
from gateway.insights.difference import Difference, Part, compare, part_of
from gateway.insights.families import LEAST_SAVING_BYTES, Family, core_flags
from gateway.insights.kinds import Kind

ORDERS = (Kind.TOOL_ORDER, Kind.JSON_KEY_ORDER, Kind.TEXT_ORDER)
_PAIRS = 48  # compared in a family
MAY_BE_NATURAL = (Kind.WORDS, Kind.NAME, Kind.NUMBER, Kind.TEXT_ORDER, Kind.EXTRA_TEXT)
_NOT_WRITTEN_BY_CLIENTS = ("(assistant)", "(tool)")


@dataclass(frozen=True, slots=True)
class Cause:
    """What differs in a family, and where. `shown_by` are pairs of members (by place) with their difference."""

    family: Family
    kind: Kind
    part: Part
    position_bytes: int
    shown_by: tuple[tuple[int, int, Difference], ...]


def find_cause(corpus: Corpus, family: Family) -> Cause | None:
    """The cause, if the prompts tell one that their author could mend."""
    found = _differences(corpus, family)
    if not found:
        return None
    kind, _ = Counter(each.kind for _, _, each in found).most_common(1)[0]
    alike = tuple(entry for entry in found if entry[2].kind is kind)
    position, _ = Counter(each.start for _, _, each in alike).most_common(1)[0]
    if kind in ORDERS:
        position = min(each.start for _, _, each in alike)
    part = part_of(corpus.samples[family.members[alike[0][0]]].text, position)
    if kind in MAY_BE_NATURAL and kind is not Kind.EXTRA_TEXT and not _is_written(corpus, family):
        return None  # of a history that is cut, answers are a part
    return Cause(family, kind, Part("cache_salt", 0) if kind is Kind.CACHE_SALT else part, position, alike)


def _differences(corpus: Corpus, family: Family) -> list[tuple[int, int, Difference]]:
    """The first difference of neighbours in time, one of each branch."""
    _, firsts = np.unique(family.branches, return_index=True)
    pairs = pairwise(np.sort(firsts)[: _PAIRS + 1].tolist())
    compared = ((one, other, compare(corpus, family, one, other)) for one, other in pairs)
    return [(one, other, difference) for one, other, difference in compared if difference is not None]


def _is_written(corpus: Corpus, family: Family) -> bool:
    """Whether enough of the core is in messages that clients write: agents read the same files at different times, and
    models say the same, but nobody can move that.
    """
    member = len(family.members) // 2
    text = corpus.samples[family.members[member]].text
    rows = np.arange(family.first_row[member], family.core_end[member])
    rows = rows[core_flags(corpus, family.is_core, rows, np.zeros(len(rows), np.int64))]
    written, start = 0, 0
    while start < len(text):
        end = text.find(b"\x1e", start + 1)
        end = len(text) if end < 0 else end
        if not part_of(text, start).name.endswith(_NOT_WRITTEN_BY_CLIENTS):
            inside = (corpus.start[rows] >= start - 1) & (corpus.start[rows] < end)
            written += int(corpus.size[rows[inside]].sum())
        start = end
    return written >= LEAST_SAVING_BYTES
