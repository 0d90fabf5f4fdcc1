"""Lines are charged to the budgets of their key, and corrected by what they used."""

import asyncio
from typing import Any

import pytest

from gateway.batches.budgets import within_budgets
from gateway.batches.sender import LineDispatchers
from gateway.config.keys import KeyConfig
from gateway.errors import GatewayError, QueueFull, QuotaExceeded
from gateway.front.budgets import Budgets
from gateway.observe.record import Record
from gateway.request import Demand, InferenceRequest, Kind, UpstreamResult, Usage

NOON_SECONDS = 1_800_000_000.0
EXPECTED_TOKENS = 40


class Answers:
    """A dispatcher that answers with this, or fails with it."""

    def __init__(self) -> None:
        self.answer: UpstreamResult | BaseException = result(usage=None)
        self.dispatched = 0

    async def dispatch(self, request: InferenceRequest, reply: Any, record: Record) -> UpstreamResult:
        self.dispatched += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def result(*, status: int = 200, usage: Usage | None) -> UpstreamResult:
    return UpstreamResult(status, usage, None, b"", b"application/json", b"")


class Rig:
    """The dispatchers of lines, for one key with a budget of 100 tokens a day."""

    def __init__(self) -> None:
        self.budgets = Budgets(KeyConfig(name="a", key="sk-a", tokens_per_day=100), lambda: NOON_SECONDS)
        self.inner = Answers()
        found = {"a": self.budgets}
        self.dispatchers = within_budgets(LineDispatchers(*[self.inner] * 4), found.get, lambda _: EXPECTED_TOKENS)

    async def send(self, key: str = "a") -> UpstreamResult:
        request = InferenceRequest("chat", Kind.LIGHT, b"POST", b"/", Demand("m"), "id")
        return await self.dispatchers.of(request).dispatch(request, None, Record("id", "chat", 0.0, 0, key))

    @property
    def used(self) -> int:
        return self.budgets.spent()["day"][1]


async def test_a_line_costs_what_its_answer_reports() -> None:
    rig = Rig()
    rig.inner.answer = result(usage=Usage(prompt_tokens=5, completion_tokens=3))
    await rig.send()
    assert rig.used == 8


async def test_an_answer_without_usage_costs_what_was_expected_and_an_error_nothing() -> None:
    rig = Rig()
    await rig.send()
    assert rig.used == EXPECTED_TOKENS
    rig.inner.answer = result(status=400, usage=None)
    await rig.send()
    assert rig.used == EXPECTED_TOKENS


@pytest.mark.parametrize("failure", [QueueFull("x"), asyncio.CancelledError()], ids=["refused", "cut"])
async def test_a_line_without_an_answer_costs_nothing(failure: BaseException) -> None:
    rig = Rig()
    rig.inner.answer = failure
    with pytest.raises((GatewayError, asyncio.CancelledError)):
        await rig.send()
    assert rig.used == 0


async def test_a_line_over_the_budget_is_not_sent() -> None:
    rig = Rig()
    await rig.send()
    await rig.send()
    with pytest.raises(QuotaExceeded, match="20 remain"):
        await rig.send()
    assert (rig.inner.dispatched, rig.used) == (2, 80)


async def test_lines_of_a_key_without_budgets_are_sent_as_they_are() -> None:
    rig = Rig()
    for _ in range(5):
        await rig.send("b")
    assert (rig.inner.dispatched, rig.used) == (5, 0)
