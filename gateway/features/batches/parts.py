"""What gateways have written of a batch, answers and errors: put together at its end, each line once.

All of this runs in a thread. A line may be in several parts, because a gateway that was slow and not dead went on with
it; the first answer counts.
"""

from collections.abc import Iterator, Sequence
from typing import BinaryIO

from gateway.features.batches.batch import Tally
from gateway.features.batches.input import Breathe
from gateway.features.batches.journal import tally_of, whole_lines

NAMES = ("output", "error")
_PIECE_BYTES = 1048576


class JoinedParts:
    """Lines of all parts, each once: those whose places are wanted.

    `has`: whether there is an answer, by the place from the first of them; `tally`: of these answers.
    """

    def __init__(self, wanted: range, breathe: Breathe) -> None:
        self.wanted = wanted
        self.has = bytearray(len(wanted))
        self.tally = Tally()
        self._breathe = breathe

    def lines(self, parts: Sequence[BinaryIO], *, failed: bool) -> Iterator[bytes]:
        """The lines of all parts, one after the other, that were not taken before."""
        for part in parts:
            part.seek(0)
            for place, line in whole_lines(part, self._breathe):
                if place in self.wanted and not self.has[at := place - self.wanted.start]:
                    self.has[at] = 1
                    self.tally += Tally(failed=1) if failed else tally_of(line)
                    yield line

    def missing(self) -> list[int]:
        """The places of lines without an answer, counted from the first."""
        return [at for at, has in enumerate(self.has) if not has]


def next_piece(lines: Iterator[bytes]) -> bytes:
    """About a megabyte of lines; empty = there are no more."""
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) >= _PIECE_BYTES:
            break
    return bytes(piece)
