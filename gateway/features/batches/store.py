"""What keeps the rows of files and batches: of a gateway alone SQLite, of several PostgreSQL."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from gateway.features.batches.batch import Batch, Owner, StoredFile
from gateway.features.batches.claims import Claim


class StoreUnusable(OSError):
    """The folder or the database of files and batches cannot be used; the text says why, and what to do."""


class FolderInUse(StoreUnusable):
    """Another gateway has the folder of files and batches open."""


class Store(Protocol):
    """Rows of files and batches.

    While it is closed, all methods raise Draining: another process may have it then.
    """

    async def open(self) -> None:
        """Raises StoreUnusable, or OSError of the contents."""

    async def close(self) -> None: ...

    def check_open(self) -> None:
        """Raises Draining if the store is not open."""

    async def add_file(self, file: StoredFile) -> None: ...

    async def file(self, file_id: str, owner: Owner) -> StoredFile | None: ...

    async def list_files(
        self, owner: Owner, purpose: str | None, after: str | None, limit: int, now: int, *, ascending: bool
    ) -> list[StoredFile]:
        """One more than `limit`, if there are more. Raises KeyError if `after` is no file of this owner."""

    async def delete_file(self, file_id: str) -> None: ...

    async def all_files(self, key: str | None = None) -> list[tuple[str, str, int, int]]:
        """Of every file its id, key, size in bytes, and when it expires; `key`: of those of this one alone."""

    async def put_batch(self, batch: Batch, files: tuple[StoredFile, ...] = ()) -> None:
        """Insert or update a batch, together with the files that it has written."""

    async def batch(self, batch_id: str, owner: Owner) -> Batch | None: ...

    async def list_batches(self, owner: Owner, after: str | None, limit: int) -> list[Batch]:
        """The newest first; one more than `limit`, if there are more. Raises KeyError as `list_files` does."""

    async def running_batches(self) -> list[Batch]:
        """Those that have not ended, the oldest first."""

    async def forget_batches(self, before: int) -> None:
        """Drop the rows of batches that have ended, and whose window closed before this time."""


class ClaimedLines(NamedTuple):
    """Lines that this gateway has to run now. `is_again`: others, or it itself, may have run a part of them before."""

    claim: Claim
    is_again: bool
    is_complete: bool  # all lines of the batch have an answer on disk


class SharedStore(Store, Protocol):
    """A store that several gateways use at the same time; `holder` is the id of one of them."""

    async def change(self, batch_id: str, change: Callable[[Batch], bool]) -> Batch | None:
        """Change a batch that no other gateway changes meanwhile, and keep it if `change` returns True.

        Returns the batch as it is then; None = it has been forgotten.
        """

    async def claim(self, batch_id: str, holder: str) -> ClaimedLines | None:
        """Claim lines by `claims.next_claim`; None = nothing at the moment."""

    async def finish(self, batch_id: str, first: int, holder: str, *, is_done: bool) -> None:
        """End a claim that is still this holder's: its lines are done, or other gateways may take it over at once."""

    async def release(self, holder: str) -> None:
        """Let others take over all claims of a gateway that stops."""

    async def tick(
        self, holder: str, held: Sequence[tuple[str, int]], reports: Mapping[str, bytes]
    ) -> tuple[set[tuple[str, int]], list[Batch]]:
        """Extend claims, given by their batch and first line, and keep reports of what this gateway did in each batch.

        Returns the claims that are still its own, and all batches that have not ended.
        """

    async def reopen(self, batch_id: str, holder: str) -> None:
        """Have all lines looked at again, because answers are missing. Only for the holder of the batch's end."""

    async def end(self, batch: Batch, holder: str, files: tuple[StoredFile, ...]) -> bool:
        """Keep a batch that has ended, with its files. False = another gateway has taken over its end."""
