"""Where the contents of files are, and the parts of batches that several gateways run: a folder, or a bucket of S3."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import BinaryIO, NamedTuple, Protocol

from gateway.batches.settings import BatchesConfig
from gateway.resources import MemoryBudget
from gateway.threads import Threads


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
    """Contents by the ids of files, and parts of batches: the answers and the errors that a gateway has written.

    Methods raise OSError where the disk fails, and StorageUnavailable where a bucket cannot be reached. `where`: as
    configured; `group`: of the journals that are parts; `piece_bytes`: of what is read; `threads`: all that reads and
    writes files of batches runs in these.
    """

    where: str
    group: JournalGroup
    piece_bytes: int
    threads: Threads

    async def open(self) -> None:
        """Create what is missing. Called before all others."""

    async def problem(self) -> str:
        """What is wrong, without changing anything; "" = nothing."""

    async def mark(self) -> str:
        """The database that this belongs to; "" = none."""

    async def set_mark(self, text: str) -> None: ...

    async def has_files(self) -> bool: ...

    async def write(self, name: str, content: AsyncIterator[bytes]) -> None:
        """Keep a content that is complete and durable; or nothing, if it ends with an exception.

        What is kept in memory when the next piece is asked for is in the memory budget. Raises MemoryFull.
        """

    def read(self, name: str) -> AsyncGenerator[bytes, None]:
        """A content in pieces. Raises FileNotFoundError before the first one."""

    async def local(self, name: str) -> BinaryIO:
        """A content as a file on this machine, or on a folder that is mounted. Raises FileNotFoundError."""

    async def delete(self, name: str) -> None:
        """Delete a content, if it is there."""

    async def delete_others(self, kept: set[str], before: float) -> None:
        """Delete all other contents that were written before this time in Unix seconds."""

    async def open_part(self, batch_id: str, holder: str, name: str) -> AnswerFile:
        """The part of a gateway, which goes on if it exists. `name`: output or error."""

    async def parts(self, batch_id: str, holders: Sequence[str], name: str) -> Sequence[BinaryIO]:
        """The parts of all these gateways, to be read and closed in a thread. One that was killed may end torn."""

    async def delete_parts(self, batch_ids: Iterable[str]) -> None: ...

    async def batches_with_parts(self) -> set[str]: ...


def shared_contents(config: BatchesConfig, memory: MemoryBudget) -> Contents:
    """What several gateways share. The client of S3 is an extra."""
    assert config.path is not None
    if config.is_in_s3:
        from gateway.batches.s3 import S3Bucket

        return S3Bucket(config.path, config.s3_endpoint, config.s3_region, memory=memory)
    from gateway.batches.folder import Folder

    return Folder(config.path)
