"""Where the contents of files are: of a gateway alone in a folder, of several in a bucket of S3."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import BinaryIO, NamedTuple, Protocol

from gateway.core.threads import Threads


class JournalGroup(NamedTuple):
    """Answers that are made durable together: so many, so large, or so old. No more are accepted meanwhile."""

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
    """Contents by the ids of files.

    Methods raise OSError where the disk fails, and StorageUnavailable where a bucket cannot be reached. `piece_bytes`:
    of what is read; `threads`: all that reads and writes files of batches runs in these.
    """

    piece_bytes: int
    threads: Threads

    async def write(self, name: str, content: AsyncIterator[bytes]) -> None:
        """Keep a content that is complete and durable; or nothing, if it ends with an exception.

        What is kept in memory when the next piece is asked for is in the memory budget. Raises MemoryFull.
        """

    def read(self, name: str) -> AsyncGenerator[bytes, None]:
        """A content in pieces. Raises FileNotFoundError before the first one."""

    async def local(self, name: str) -> BinaryIO:
        """A content as a file on this machine. Raises FileNotFoundError."""

    async def delete(self, name: str) -> None:
        """Delete a content, if it is there."""

    async def delete_others(self, kept: set[str], before: float) -> None:
        """Delete all other contents that were written before this time in Unix seconds."""
