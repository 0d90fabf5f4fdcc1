"""What may be tried again: by the kind of failure, once, and within a budget."""

from gateway.config import UpstreamConfig
from gateway.errors import BackendError, ConnectFailed, ModelMissing, ReusedConnectionClosed

_MAX_CONNECT_FAILURES = 3
_MAX_SAVED = 100.0


class RetryBudget:
    """Each request served earns a fraction of a retry; a few are there from the start."""

    def __init__(self, config: UpstreamConfig) -> None:
        self._fraction = config.retry_budget_fraction
        self._tokens = float(config.retry_budget_min)
        self._ceiling = max(_MAX_SAVED * self._fraction, self._tokens)

    def earn(self) -> None:
        """A request was sent for the first time."""
        self._tokens = min(self._ceiling, self._tokens + self._fraction)

    def spend(self) -> bool:
        """Take one retry, if there is one."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Attempts:
    """The tries of one request: which backends failed it, and whether another try is allowed."""

    __slots__ = ("_budget", "_connect_failures", "_repeatable", "_repeated", "avoid", "fresh")

    def __init__(self, budget: RetryBudget, *, repeatable: bool) -> None:
        self._budget = budget
        self._repeatable = repeatable
        self._connect_failures = 0
        self._repeated = False
        self.avoid: frozenset[str] = frozenset()
        self.fresh = False  # the next try needs a connection that was not used before
        budget.earn()

    def allows(self, error: BackendError, backend: str, *, others: bool, waits: bool = False) -> bool:
        """Whether to try again after this failure, of which the client has seen nothing.

        `others`: a backend that has not failed this request exists. `waits`: the request may wait for one to come back.
        A connection that never came about, or a pooled one that was closed meanwhile, tells nothing of the request and
        is not charged to the budget.
        """
        others = others or (waits and error.passing)
        if isinstance(error, ConnectFailed):
            self.avoid |= {backend}
            self._connect_failures += 1
            return waits or (others and self._connect_failures <= _MAX_CONNECT_FAILURES)
        if not self._repeatable or not error.retryable:
            return False
        if self._repeated and not isinstance(error, ModelMissing):  # who lacks the model has not run the request
            return False
        if isinstance(error, ReusedConnectionClosed):
            self._repeated = self.fresh = True
            return True
        self.avoid |= {backend}
        if not others or not self._budget.spend():
            return False
        self._repeated = True
        return True
