"""What owners of running batches have in common: of a gateway alone (`runner.py`), or one of several (`shared.py`)."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence

from gateway.config import Config
from gateway.features.batches.batch import Batch
from gateway.features.batches.checks import InputChecks
from gateway.features.batches.run import RunParts


class BatchRunner(ABC):
    """Owner of the batches that have not ended. The others are in the store only."""

    def __init__(self, parts: RunParts, checks: InputChecks) -> None:
        self._parts = parts
        self._checks = checks

    def follow(self, config: Config) -> None:
        """Take over limits, for files that are checked from now on, and the bound of lines in flight."""
        self._checks.follow(config)
        self._lifetime_seconds = config.batches.lifetime_seconds
        self._parts.slots.follow(config.batches.lines_in_flight)

    @abstractmethod
    def batches(self) -> Sequence[Batch]:
        """The batches that have not ended, of all gateways."""

    def batches_here(self) -> Sequence[Batch]:
        """The same, as this gateway runs them."""
        return self.batches()

    def states(self) -> dict[str, int]:
        """How many batches are in each state; one that is paused is in no other."""
        return Counter("paused" if batch.paused else batch.status for batch in self.batches())

    def promoted(self) -> dict[str, int]:
        """How many batches use more than idle capacity here, by the class of their lines."""
        return Counter(batch.promoted for batch in self.batches_here() if batch.promoted)

    def count(self, key: str) -> int:
        """How many batches of this key have not ended."""
        return sum(batch.owner.key == key for batch in self.batches())

    def enqueued(self, batch: Batch) -> int:
        """Lines without an answer in the other batches of the same key."""
        others = [each for each in self.batches() if each.id != batch.id and each.owner.key == batch.owner.key]
        return sum(other.total - other.tally.lines for other in others)

    async def open(self, batches: Iterable[Batch]) -> None:
        """Take up batches that have not ended."""
        for batch in batches:
            self.start(batch)

    @abstractmethod
    def start(self, batch: Batch) -> None:
        """Run a batch that is in the store, from the state that it has reached."""

    @abstractmethod
    def find(self, batch_id: str) -> Batch | None:
        """The batch as it is now; None = as the store has it."""

    @abstractmethod
    async def files_in_use(self) -> set[str]:
        """Files that may not be deleted."""

    @abstractmethod
    async def cancel(self, batch: Batch) -> Batch:
        """Start no more of its lines, on any gateway. It ends when those in flight have ended."""

    @abstractmethod
    async def sweep(self) -> None:
        """Delete files that gateways which were killed have left over."""

    @abstractmethod
    async def stop(self) -> None:
        """Abort what is in flight, and make the answers durable. Every batch keeps its state."""
