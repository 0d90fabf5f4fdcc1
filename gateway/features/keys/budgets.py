"""Daily and monthly (UTC) token budgets of an API key; each period starts with the full amount. Pure.

Tokens are charged when a request is admitted, by the expected number, and corrected when it ends. A request belongs to
the period of its admission: after its end, corrections have no effect.
"""

from calendar import leapdays, monthrange
from collections.abc import Callable

from gateway.core.errors import QuotaExceeded
from gateway.features.keys.settings import KeyConfig

_DAY_SECONDS = 86400
_YEAR_DAYS = 365.2425
Spent = dict[str, list[int]]  # by kind of period: its first day, since 1970, and the tokens used in it


def month_of(day: int) -> tuple[int, int]:
    """The first days of this day's month and of the next month; days count from 1970."""
    year = 1970 + int(day / _YEAR_DAYS)
    while _new_year(year) > day:
        year -= 1
    while _new_year(year + 1) <= day:
        year += 1
    first, month = _new_year(year), 1
    while (after := first + monthrange(year, month)[1]) <= day:
        first, month = after, month + 1
    return first, after


def _new_year(year: int) -> int:
    """The first day of a year, in days from 1970."""
    return 365 * (year - 1970) + leapdays(1970, year)


class Budget:
    """The tokens of one kind of period, of which one is current: from `first_day` until before `end_day`."""

    __slots__ = ("_is_month", "_renewal", "end_day", "first_day", "limit", "used")

    def __init__(self, is_month: bool, limit: int, day: int) -> None:
        self._is_month = is_month
        self._renewal = "on the first day of the next month (UTC)" if is_month else "at midnight UTC"
        self.limit = limit
        self.used = 0
        self.first_day = self.end_day = 0
        self._begin(day)

    @property
    def name(self) -> str:
        return "month" if self._is_month else "day"

    def _begin(self, day: int) -> None:
        self.first_day, self.end_day = month_of(day) if self._is_month else (day, day + 1)

    def at(self, day: int) -> None:
        """Begin another period, if this day is in one. A clock that is set back by a day or less changes nothing."""
        if not self.first_day - 1 <= day < self.end_day:
            self._begin(day)
            self.used = 0

    def apply(self, limit: int) -> None:
        """Take over another limit; used tokens still count."""
        self.limit = limit

    def check(self, tokens: int, unix_seconds: float) -> None:
        """Raises QuotaExceeded if these additional tokens would exceed the limit."""
        if self.used + tokens <= self.limit:
            return
        what = f"the quota of {self.limit} tokens per {self.name} of this API key"
        if tokens > self.limit:
            raise QuotaExceeded(f"Request too large for {what}: it needs about {tokens} tokens.")
        raise QuotaExceeded(
            f"You exceeded {what}: {max(0, self.limit - self.used)} remain, and this request needs about {tokens}."
            f" The quota is renewed {self._renewal}.",
            retry_after_seconds=self.end_day * _DAY_SECONDS - unix_seconds,
        )

    def add(self, tokens: int, day: int) -> None:
        """Count tokens of a request that was admitted on this day, if it is in the current period."""
        if self.first_day <= day < self.end_day:
            self.used = max(0, self.used + tokens)


class Budgets:
    """The budgets of one key."""

    def __init__(self, key: KeyConfig, unix_seconds: Callable[[], float]) -> None:
        self._unix_seconds = unix_seconds
        self._budgets: dict[str, Budget] = {}
        self.apply(key)

    def __repr__(self) -> str:
        return "".join(f", {each.used}/{each.limit} a {name}" for name, each in self._budgets.items())

    def apply(self, key: KeyConfig) -> None:
        """Take over other limits; used tokens still count."""
        limits = {"day": key.tokens_per_day, "month": key.tokens_per_month}
        for name, limit in limits.items():
            if limit is None:
                self._budgets.pop(name, None)
            elif name in self._budgets:
                self._budgets[name].apply(limit)
            else:
                self._budgets[name] = Budget(name == "month", limit, self._today())

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of one request; None = unlimited."""
        return min((each.limit for each in self._budgets.values()), default=None)

    def charge(self, tokens: int) -> int:
        """Charge the expected tokens of a request; returns the day, for `correct`. Raises QuotaExceeded."""
        self.check(tokens)
        return self.spend(tokens)

    def spend(self, tokens: int) -> int:
        """Charge tokens that a running request used beyond its estimate; returns the day, which is today."""
        day = self._turn()
        for budget in self._budgets.values():
            budget.add(tokens, day)
        return day

    def check(self, tokens: int) -> None:
        """Raises QuotaExceeded if these additional tokens would exceed a limit."""
        self._turn()
        now = self._unix_seconds()
        for budget in self._budgets.values():
            budget.check(tokens, now)

    def correct(self, day: int, charged_tokens: int, used_tokens: int) -> None:
        """A request charged on this day ended: replace its charge by its use.

        Whatever a backend reports, the charge is between 0 and the estimate plus the limit.
        """
        today = self._today()
        for budget in self._budgets.values():
            budget.at(today)
            budget.add(max(0, min(used_tokens, charged_tokens + budget.limit)) - charged_tokens, day)

    def spent(self) -> Spent:
        """The use of the current periods, for `restore`."""
        return {name: [each.first_day, each.used] for name, each in self._budgets.items()}

    def restore(self, spent: Spent) -> None:
        """Count the use of another process in the same periods."""
        today = self._today()
        for name, (first_day, used) in spent.items():
            if name in self._budgets:
                budget = self._budgets[name]
                budget.at(today)
                if first_day == budget.first_day:
                    budget.add(used, first_day)

    def _turn(self) -> int:
        """Begin the periods of today. Returns the day; a later one where the clock was set back."""
        day = today = self._today()
        for budget in self._budgets.values():
            budget.at(today)
            day = max(day, budget.first_day)
        return day

    def _today(self) -> int:
        return int(self._unix_seconds() // _DAY_SECONDS)
