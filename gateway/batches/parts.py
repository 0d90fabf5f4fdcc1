"""What several gateways have written of a batch: a file of answers and one of errors each, put together at its end.

All of this runs in a thread. A line may be in several parts, because a gateway that was slow and not dead went on with
it; the first answer counts.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import BinaryIO

from gateway.batches.batch import LineUsage, Tally
from gateway.batches.input import Breathe, CheckedInput
from gateway.batches.journal import usage_in, whole_lines

NAMES = ("output", "error")
_WRITE_BYTES = 1048576


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """The parts of one batch, in a folder of their own. Only their own gateways change them."""

    folder: Path
    breathe: Breathe

    def path(self, holder: str, name: str) -> Path:
        return self.folder / f"{holder}.{name}.jsonl"

    def lines(self, holder: str, name: str, checked: CheckedInput) -> Iterator[tuple[int, bytes]]:
        """The place and text of each whole line of a part."""
        try:
            source = open(self.path(holder, name), "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:  # this gateway has not written any
            return
        with source:
            for custom_id, line in whole_lines(source, self.breathe):
                place = checked.places.get(hash(custom_id))
                if place is not None:
                    yield place, line

    def answered(self, holders: Sequence[str], checked: CheckedInput) -> set[int]:
        """The places of all lines that have an answer."""
        pairs = [(holder, name) for holder in holders for name in NAMES]
        return {place for pair in pairs for place, _ in self.lines(*pair, checked)}

    def put_together(
        self, holders: Sequence[str], checked: CheckedInput, targets: Sequence[BinaryIO]
    ) -> tuple[Tally, list[int]]:
        """Write each line once. Returns what was written, and the places of lines without an answer."""
        tally, is_missing = Tally(), bytearray(b"\1") * len(checked.index)
        for name, target in zip(NAMES, targets, strict=True):
            failed = name == "error"
            for holder in holders:
                for place, line in self.lines(holder, name, checked):
                    if is_missing[place]:
                        is_missing[place] = 0
                        target.write(line)
                        tally.add(LineUsage() if failed else usage_in(line), failed=failed)
        return tally, [place for place, missing in enumerate(is_missing) if missing]

    def delete(self) -> None:
        rmtree(self.folder, ignore_errors=True)


def new_result(path: Path) -> BinaryIO:
    """A file that is written in large pieces, and `finished`."""
    return open(path, "xb", buffering=_WRITE_BYTES, opener=lambda name, flags: os.open(name, flags, 0o600))


def finished(result: BinaryIO) -> int:
    """Make a file durable. Returns its size in bytes."""
    result.flush()
    os.fdatasync(result.fileno())
    return result.tell()


def delete_parts(folder: Path, names: Iterable[str]) -> None:
    """Delete the parts of batches that have ended."""
    for name in names:
        rmtree(folder / name, ignore_errors=True)
