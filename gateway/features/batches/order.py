"""The order of a batch's lines: depth first through the tree of their prompts' prefixes, a range of it for each engine.

Lines that share a prefix then follow each other, so the engine's KV cache holds it when the next one arrives. Sorting
by the prefix keys is that order, because the keys are chained. Memory: the keys until the lines are arranged, and 28
bytes a line.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from struct import pack
from typing import Final, TypeVar

_KEY_BYTES: Final = 8
_STEP_LINES: Final = 2048  # between two interruptions: a few milliseconds
_CUT_SHARE: Final = 0.1  # of a range by which its border may move, to be at the border of a large subtree
_OUTPUT_WEIGHT: Final = 4.0  # in a full batch, an output token costs about as much as so many prompt tokens

_Number = TypeVar("_Number", int, float)


@dataclass(slots=True)
class _Range:
    """Lines of one engine, by their places in the order; `cost` is of what is left, in prompt tokens."""

    start: int
    end: int
    cost: float

    def __len__(self) -> int:
        return self.end - self.start


class PrefixOrder:
    """Lines are added first, then arranged, then taken from the ranges of all engines in turn."""

    def __init__(self) -> None:
        self._keys = bytearray()  # of all lines, as big-endian bytes, which compare as the keys do
        self._ends = array("Q", [0])
        self._prompt_tokens = array("I")
        self._output_tokens = array("I")
        # By place in the order: the line, the keys that it shares with the line before it, and its cost after that one.
        self._order = array("I")
        self._shared = array("I")
        self._costs = array("f")
        self._ranges: list[_Range] = []

    def add(self, keys: Sequence[int], prompt_tokens: int, output_tokens: int) -> None:
        """Add the next line: its chained prefix keys, and the estimated lengths of prompt and output."""
        self._keys += pack(f">{len(keys)}Q", *keys)
        self._ends.append(len(self._keys))
        self._prompt_tokens.append(max(1, prompt_tokens))
        self._output_tokens.append(output_tokens)

    def part(self, first: int, end: int) -> "PrefixOrder":
        """An order of some of the lines, counted from 0 again, before these are arranged."""
        part, begin = PrefixOrder(), self._ends[first]
        part._keys = self._keys[begin : self._ends[end]]
        part._ends = array("Q", [each - begin for each in self._ends[first : end + 1]])
        part._prompt_tokens, part._output_tokens = self._prompt_tokens[first:end], self._output_tokens[first:end]
        return part

    def arrange(self, engines: int) -> Iterator[None]:
        """Put the lines in order, in steps of a few milliseconds between which the caller may do other work."""
        runs, count = [], len(self._prompt_tokens)
        for start in range(0, count, _STEP_LINES):
            runs.append(array("I", sorted(range(start, min(count, start + _STEP_LINES)), key=self._path)))
            yield
        for at, line in enumerate(merge(*runs, key=self._path)):
            self._order.append(line)
            if at % _STEP_LINES == 0:
                yield
        yield from self._compare()
        self._keys, self._ends, self._prompt_tokens = bytearray(), array("Q"), array("I")
        yield from self._cut(engines)
        for own in self._ranges:
            yield
            self._sort_groups(own)

    def in_turn(self) -> Iterator[int]:
        """All lines that are left, from the ranges in turn, so that all ranges end at about the same time."""
        totals = [own.cost for own in self._ranges]
        while left := [at for at, own in enumerate(self._ranges) if len(own)]:
            own = self._ranges[max(left, key=lambda at: self._ranges[at].cost / totals[at])]
            own.cost -= self._costs[own.start]
            own.start += 1
            yield self._order[own.start - 1]

    def _path(self, line: int) -> bytes:
        return bytes(self._keys[self._ends[line] : self._ends[line + 1]])

    def _compare(self) -> Iterator[None]:
        """Compute what neighbours share, and what each line then costs."""
        before = b""
        for at, line in enumerate(self._order):
            path = self._path(line)
            shared = _shared_keys(before, path)
            # About: keys stand for pieces of different sizes.
            uncached = self._prompt_tokens[line] * (1 - shared / (len(path) // _KEY_BYTES + 1))
            self._shared.append(shared)
            self._costs.append(uncached + _OUTPUT_WEIGHT * self._output_tokens[line])
            before = path
            if at % _STEP_LINES == 0:
                yield

    def _cut(self, engines: int) -> Iterator[None]:
        """Cut ranges of about equal cost, with borders between the largest subtrees nearby."""
        total, count = sum(self._costs), len(self._order)
        start = at = 0
        passed = cost = 0.0  # up to `at`, and of the range
        for number in range(1, engines):
            best, best_rank, best_cost = at, (self._shared_at(at), 2.0), 0.0
            cost = 0.0
            target, slack = total * number / engines, _CUT_SHARE * total / engines
            while at < count and passed < target + slack:
                cost += self._costs[at]
                passed += self._costs[at]
                at += 1
                rank = self._shared_at(at), abs(passed - target) / total
                if passed < target - slack or rank < best_rank:
                    best, best_rank, best_cost = at, rank, cost
                if at % _STEP_LINES == 0:
                    yield
            self._ranges.append(_Range(start, best, best_cost))
            passed -= cost - best_cost
            start = at = best
        self._ranges.append(_Range(start, count, total - passed))

    def _shared_at(self, place: int) -> int:
        return self._shared[place] if place < len(self._shared) else 0

    def _sort_groups(self, own: _Range) -> None:
        """Put the groups below the range's common prefix in another order: most output per uncached token first.

        The engine then decodes for long while it prefills little, and fills its batch.
        """
        start, end = own.start, own.end
        if end - start < 2:
            return
        common = min(self._shared[start + 1 : end])
        borders = [start, *[at for at in range(start + 1, end) if self._shared[at] == common], end]
        groups = [slice(one, other) for one, other in pairwise(borders)]
        groups.sort(key=self._output_share, reverse=True)
        self._shared[start] = common
        self._order[start:end] = _joined(self._order, groups)
        self._shared[start:end] = _joined(self._shared, groups)
        self._costs[start:end] = _joined(self._costs, groups)

    def _output_share(self, group: slice) -> float:
        output = sum([self._output_tokens[line] for line in self._order[group]])
        return output / sum(self._costs[group])


def _joined(values: "array[_Number]", groups: list[slice]) -> "array[_Number]":
    joined = values[:0]
    for group in groups:
        joined.extend(values[group])
    return joined


def _shared_keys(one: bytes, other: bytes) -> int:
    """The leading keys that both have. Chained keys are equal only where all before them are, so bisection finds it."""
    low, high = 0, min(len(one), len(other)) // _KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        place = slice((middle - 1) * _KEY_BYTES, middle * _KEY_BYTES)
        if one[place] == other[place]:
            low = middle
        else:
            high = middle - 1
    return low
