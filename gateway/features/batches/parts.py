"""What several gateways have written of a batch, answers and errors: put together at its end, each line once.

All of this runs in a thread. A line may be in several parts, because a gateway that was slow and not dead went on with
it; the first answer counts.
"""

from collections.abc import Iterator
from typing import BinaryIO

from gateway.features.batches.batch import LineUsage, Tally
from gateway.features.batches.input import Breathe, CheckedInput
from gateway.features.batches.journal import usage_in, whole_lines

NAMES = ("output", "error")
_PIECE_BYTES = 1048576


class JoinedParts:
    """The lines of all parts, each once. `tally`: what was taken of them."""

    def __init__(self, checked: CheckedInput, breathe: Breathe) -> None:
        self.tally = Tally()
        self._checked = checked
        self._breathe = breathe
        self._has = bytearray(len(checked.index))

    def lines(self, parts: BinaryIO, *, failed: bool) -> Iterator[bytes]:
        """The lines of all parts, one after the other, that were not taken before."""
        parts.seek(0)
        for custom_id, line in whole_lines(parts, self._breathe):
            place = self._checked.places.get(hash(custom_id))
            if place is not None and not self._has[place]:
                self._has[place] = 1
                self.tally.add(LineUsage() if failed else usage_in(line), failed=failed)
                yield line

    def answered(self, first: int, end: int) -> list[int]:
        """The places of lines with an answer, counted from the first."""
        return [place for place, has in enumerate(self._has[first:end]) if has]

    def missing(self) -> list[int]:
        """The places of all lines without an answer."""
        return [place for place, has in enumerate(self._has) if not has]


def next_piece(lines: Iterator[bytes]) -> bytes:
    """About a megabyte of lines; empty = there are no more."""
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) >= _PIECE_BYTES:
            break
    return bytes(piece)
