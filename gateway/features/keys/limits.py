"""The limits of all keys, and their usage as processes exchange it. Pure."""

from collections.abc import Callable, Sequence

from gateway.features.keys.budgets import Spent
from gateway.features.keys.rate_limits import KeyLimits
from gateway.features.keys.settings import KeyConfig


class AllLimits:
    """Owner of the limits of the keys that have any, by name."""

    def __init__(self, clock: Callable[[], float], unix_seconds: Callable[[], float]) -> None:
        self._clock = clock
        self._unix_seconds = unix_seconds
        self.by_name: dict[str, KeyLimits] = {}

    def apply(self, keys: Sequence[KeyConfig]) -> None:
        """Take over other keys and limits. Earlier usage still counts."""
        limits: dict[str, KeyLimits] = {}
        for key in keys:
            if key.is_limited:
                known = self.by_name.get(key.name)
                limits[key.name] = known or KeyLimits(key, self._clock, self._unix_seconds)
                limits[key.name].apply(key)
        self.by_name = limits

    def accounts(self) -> dict[str, dict[str, float]]:
        """Recent usage of each key with limits; the input of `restore`."""
        return {name: limits.account() for name, limits in self.by_name.items()}

    def restore(self, accounts: dict[str, dict[str, float]], ago_seconds: float) -> None:
        """Add another process's counts of this age."""
        for name, account in accounts.items():
            if name in self.by_name:
                self.by_name[name].restore(account, ago_seconds)

    def spent(self) -> dict[str, Spent]:
        """Each key's usage of its budgets; the input of `restore_spent`."""
        spent = {name: limits.spent() for name, limits in self.by_name.items()}
        return {name: periods for name, periods in spent.items() if periods}

    def restore_spent(self, spent: dict[str, Spent]) -> None:
        """Add another process's usage of budgets."""
        for name, periods in spent.items():
            if name in self.by_name:
                self.by_name[name].restore_spent(periods)

    def running(self) -> dict[str, int]:
        """Requests that run and wait, by key with limits."""
        running = {name: limits.running + limits.running_elsewhere for name, limits in self.by_name.items()}
        return {name: count for name, count in running.items() if count}

    def run_elsewhere(self, running: dict[str, int]) -> None:
        """So many requests of these keys, and none of others, run in another process."""
        for name, limits in self.by_name.items():
            limits.run_elsewhere(running.get(name, 0))
