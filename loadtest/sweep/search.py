"""In which rounds configurations are tried, and which of them stay. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from loadtest.report.inference import mann_whitney, significant
from loadtest.sweep.judge import Judged
from loadtest.sweep.plan import Halving

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Round:
    """So many configurations, at most, each in runs that are this share of whole ones."""

    count: int
    share: float


def rounds(count: int, halving: Halving | None) -> list[Round]:
    """One round of whole runs, or successive halving: each round is longer and has fewer, the last one is whole."""
    if halving is None or count <= 1:
        return [Round(count, 1.0)]
    by_length = math.floor(math.log(1 / halving.shortest, halving.factor) + 1e-9)
    by_count = math.ceil(math.log(count, halving.factor) - 1e-9)
    cuts = min(by_length, by_count)
    return [
        Round(math.ceil(count / halving.factor**cut - 1e-9), halving.factor ** (cut - cuts)) for cut in range(cuts + 1)
    ]


def best(found: Mapping[Item, Judged], count: int) -> list[Item]:
    """The best of those that could be measured, at most `count`, best first."""
    return sorted(found, key=lambda item: found[item].rank)[:count]


def winner(found: Mapping[Item, Judged]) -> Item | None:
    """The best of those that nothing stands against."""
    return next((item for item in best(found, 1) if found[item].fits), None)


def tied(found: Mapping[Item, Judged], first: Item) -> list[Item]:
    """Those within all bounds that their runs do not tell from the first one, best first.

    All pairs are tested together, as any of them could have come first by chance.
    """
    fitting = [item for item in best(found, len(found)) if found[item].fits]
    p_values = {pair: mann_whitney(found[pair[0]].values, found[pair[1]].values) for pair in combinations(fitting, 2)}
    apart = significant(p_values)
    return [item for item in fitting if item != first and not apart & {(first, item), (item, first)}]


def frontier(items: Sequence[Item], cost: Callable[[Item], float], worth: Callable[[Item], float]) -> list[Item]:
    """Those that no other beats in one without losing in the other, by rising cost."""
    kept: list[Item] = []
    for item in sorted(items, key=lambda item: (cost(item), -worth(item))):
        if not kept or worth(item) > worth(kept[-1]):
            kept.append(item)
    return kept
