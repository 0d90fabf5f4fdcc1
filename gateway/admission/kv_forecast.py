"""What the requests that run on one engine will take of its KV cache at most, as each grows, and ends.

Running sequences all grow by one token in a step, and give back everything when they end. So not the sum of what each
will have in the end must fit, but the most that all together will have at any one moment: that of the end of one of
them. If all began together the two are the same; if they are each at another place, about half of their answers is not
there at once. Pure.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple


class Growth(NamedTuple):
    """A request that runs: steps until it ends, tokens it has now (more, if in doubt), and those it gets in a step."""

    left_steps: int
    present_tokens: int
    growth_tokens: int


class PeakForecast:
    """The peak to come, if `base_tokens` stay taken as long as anything runs."""

    __slots__ = ("_after", "_before", "_growth", "_left", "_present", "base_tokens", "peak_tokens")

    def __init__(self, base_tokens: int, courses: Iterable[Growth]) -> None:
        lasting = sorted(courses, reverse=True)
        self.base_tokens = base_tokens
        self._left = [-course.left_steps for course in lasting]
        # Of all that still run at each one's end.
        self._present = list(accumulate([course.present_tokens for course in lasting], initial=base_tokens))
        self._growth = list(accumulate([course.growth_tokens for course in lasting], initial=0))
        at_ends = [
            present + growth * course.left_steps
            for present, growth, course in zip(self._present[1:], self._growth[1:], lasting, strict=True)
        ]
        self._before = list(accumulate(at_ends, max, initial=base_tokens))
        with_one_more = [tokens + course.left_steps for tokens, course in zip(at_ends, lasting, strict=True)]
        self._after = list(accumulate(reversed(with_one_more), max, initial=0))
        self.peak_tokens = self._before[-1]

    def __repr__(self) -> str:
        return f"<PeakForecast {self.peak_tokens} tokens at most, {self.base_tokens} of them lasting>"

    def peak_with(self, course: Growth) -> int:
        """The peak if this request began now."""
        left, growth = course.left_steps, course.growth_tokens
        # Several sequences of one request are reckoned as one that grows and others that are there from the beginning.
        present = course.present_tokens + (growth - 1) * left
        longer = bisect_left(self._left, -left)  # so many run on when it ends
        its_end = self._present[longer] + self._growth[longer] * left + present + left
        sooner = self._after[len(self._left) - longer]
        return max(self._before[longer], its_end, sooner + present if sooner else 0)
