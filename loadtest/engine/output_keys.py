"""The keys of the blocks that an answer fills, hashed as far as somebody asks."""

from collections.abc import Callable, Sequence
from typing import overload

from loadtest.engine.tokens import BYTES_PER_TOKEN, block_keys


class OutputKeys(Sequence[int]):
    """Chain hashes that go on from the last full block of a prompt.

    `tail` are the packed prompt tokens after that block, `packed_output` packs the output's tokens from one number up
    to another. An answer that is broken off early costs no more than it had.
    """

    def __init__(
        self,
        parent_key: int,
        tail: bytes,
        packed_output: Callable[[int, int], bytes],
        output_tokens: int,
        block_size: int,
    ) -> None:
        self._parent_key = parent_key
        self._tail = tail
        self._packed_output = packed_output
        self._block_size = block_size
        self._tail_tokens = len(tail) // BYTES_PER_TOKEN
        self._length = (self._tail_tokens + output_tokens) // block_size
        self._keys: list[int] = []

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        wanted = range(self._length)[index]
        if isinstance(wanted, range):
            self._extend(max(wanted[0], wanted[-1]) + 1 if wanted else 0)
            return [self._keys[number] for number in wanted]
        self._extend(wanted + 1)
        return self._keys[wanted]

    def _extend(self, blocks: int) -> None:
        have = len(self._keys)
        if blocks <= have:
            return
        start, stop = have * self._block_size, blocks * self._block_size
        packed = self._tail[start * BYTES_PER_TOKEN :]
        packed += self._packed_output(max(start - self._tail_tokens, 0), stop - self._tail_tokens)
        self._keys += block_keys(packed, self._block_size, self._keys[-1] if have else self._parent_key)
