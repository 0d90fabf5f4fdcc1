"""Lines count against the token budgets of their API key, as the key's own requests do."""

from collections.abc import Callable
from typing import Any

from gateway.batches.sender import LineDispatcher, LineDispatchers
from gateway.front.budgets import Budgets
from gateway.observe.record import Record
from gateway.request import InferenceRequest, UpstreamResult

BudgetsOf = Callable[[str], Budgets | None]  # by the name of a key
Expected = Callable[[InferenceRequest], int]  # tokens


class WithinBudgets:
    """Sends lines by another dispatcher: charged the expected tokens, corrected by those that were used.

    A line that fails or is cut costs nothing: it is computed again, or no answer of it is kept.
    """

    def __init__(self, dispatcher: LineDispatcher, budgets_of: BudgetsOf, expected_tokens: Expected) -> None:
        self._dispatcher = dispatcher
        self._budgets_of = budgets_of
        self._expected_tokens = expected_tokens

    async def dispatch(self, request: InferenceRequest, reply: Any, record: Record) -> UpstreamResult:
        """Answer through `reply`, and write `record` on the way. Raises QuotaExceeded or another GatewayError."""
        budgets = self._budgets_of(record.client)
        if budgets is None:
            return await self._dispatcher.dispatch(request, reply, record)
        expected, used = self._expected_tokens(request), 0
        day = budgets.charge(expected)
        try:
            answer = await self._dispatcher.dispatch(request, reply, record)
            used = answer.used_tokens(expected)
            return answer
        finally:
            budgets.correct(day, expected, used)


def within_budgets(parts: LineDispatchers, budgets_of: BudgetsOf, expected_tokens: Expected) -> LineDispatchers:
    """The same dispatchers, for lines of keys that may have budgets."""
    return LineDispatchers(*(WithinBudgets(each, budgets_of, expected_tokens) for each in parts))
