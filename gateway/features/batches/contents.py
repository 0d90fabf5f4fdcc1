"""Where the contents of files and the parts of batches are: of a gateway alone in a folder, of several in S3."""

import errno
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import BinaryIO, NamedTuple, Protocol

from gateway.core.threads import Threads

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def has_no_room(error: OSError) -> bool:
    return error.errno in _NO_ROOM


class JournalGroup(NamedTuple):
    """Limits of the answers that are made durable together. Appending blocks while a group is written."""

    lines: int
    size_bytes: int
    seconds: float


class AnswerFile(Protocol):
    """A file that lines are appended to."""

    async def append(self, data: bytes) -> None:
        """Write all of it, and make it durable; or leave the file as it was.

        Raises OSError, or StorageUnavailable.
        """

    async def finish(self) -> None:
        """Append nothing more, and close the file once what is appended now has ended."""


class Contents(Protocol):
    """Contents by the ids of files, and parts: the answers and the errors that each gateway has written of a batch.

    Methods raise OSError where the disk fails, and StorageUnavailable where a bucket cannot be reached. `group`: of the
    journals that are parts; `piece_bytes`: of what is read; `threads`: all that reads and writes files of batches runs
    in these.
    """

    group: JournalGroup
    piece_bytes: int
    threads: Threads

    async def write(self, name: str, content: AsyncIterator[bytes]) -> None:
        """Keep a content that is complete and durable; or nothing, if it ends with an exception.

        What is kept in memory when the next piece is asked for is in the memory budget. Raises MemoryFull, or
        StorageFull where the disk is full.
        """

    def read(self, name: str) -> AsyncGenerator[bytes, None]:
        """A content in pieces. Raises FileNotFoundError before the first one."""

    async def local(self, name: str) -> BinaryIO:
        """A content as a file on this machine. Raises FileNotFoundError."""

    async def delete(self, name: str) -> None:
        """Delete a content, if it is there."""

    async def delete_others(self, kept: set[str], before: float) -> None:
        """Delete all other contents that were written before this time in Unix seconds."""

    def new_part(self, batch_id: str, holder: str, name: str) -> AnswerFile:
        """A part of a gateway. `name`: output or error."""

    async def parts(self, batch_id: str, name: str) -> Sequence[BinaryIO]:
        """The parts of all gateways, to be read and closed in a thread."""

    async def delete_parts(self, batch_ids: Iterable[str]) -> None: ...

    async def batches_with_parts(self) -> set[str]: ...
