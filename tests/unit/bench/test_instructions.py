"""The budget of instructions: what grew is named, what shrank is no fault."""

import asyncio
import json
from contextlib import AbstractContextManager, nullcontext

import pytest

from tests.bench.instructions import lines, workloads
from tests.bench.instructions.command import BUDGET, over_budget, table
from tests.bench.instructions.count import ROWS
from tests.bench.instructions.gateway import Loop, clients


class Blocks:
    """A counter that counts the blocks alone."""

    def __init__(self) -> None:
        self.begun = 0
        self.blocks = 0

    def begin(self) -> None:
        self.begun += 1

    def counting(self) -> AbstractContextManager[None]:
        assert self.begun == 1
        self.blocks += 1
        return nullcontext()


@pytest.mark.parametrize("figure", [90, 100, 103])
def test_a_figure_within_three_percent_of_its_budget_is_accepted(figure: int) -> None:
    assert over_budget({"chat": figure}, {"chat": 100}) == []


def test_a_figure_that_grew_is_named_with_its_budget() -> None:
    (line,) = over_budget({"chat": 1_040}, {"chat": 1_000})
    assert line.startswith("chat: 1,040 instructions, the budget is 1,000")


def test_a_figure_without_a_budget_is_not_accepted() -> None:
    (line,) = over_budget({"chat": 1}, {})
    assert "no budget" in line


def test_the_table_shows_what_was_counted_beside_the_budget() -> None:
    assert "| 1 KB chat (`chat_1k`) | 90 | 100 | 0.900 |" in table({"chat_1k": 90}, {"chat_1k": 100})


@pytest.mark.parametrize("build", ["python", "compiled"])
def test_every_workload_has_a_budget(build: str) -> None:
    assert set(json.loads(BUDGET.read_text())[build]) == {
        row.name for row in ROWS if row.has_budget and row.name != "nothing"
    }


@pytest.mark.parametrize(
    "run",
    [
        lambda counter: workloads.chat(counter, "1k", 5),
        lambda counter: workloads.streamed(counter, 3, 5),
        lambda counter: lines.batched(counter, 5, streams=True),
        lambda counter: lines.batched(counter, 5, streams=False),
        lambda counter: lines.asked(counter, 5, streams=True),
        lambda counter: lines.asked(counter, 5, streams=False, through=False),
        lambda counter: workloads.chat(counter, "1k", 5, through=False),
        lambda counter: workloads.streamed(counter, 3, 5, through=False),
        lambda counter: workloads.embedded(counter, 64),
    ],
    ids=[
        "chat",
        "stream",
        "batch",
        "batch sent whole",
        "like a line",
        "unrouted, like a line",
        "unrouted chat",
        "unrouted stream",
        "embedding",
    ],
)
def test_every_counted_request_is_answered(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(workloads, "_WARM_UPS", 64)
    counter = Blocks()
    run(counter)
    assert counter.blocks == 1


def test_a_refusal_is_not_counted_as_an_answer() -> None:
    async def ask() -> None:
        with clients(1, b"}") as (_, (client,)):
            await client.ask(workloads.request(b"/v1/chat/completions", {"model": "another", "messages": []}))

    with asyncio.Runner(loop_factory=lambda: Loop(lambda _: [])) as runner, pytest.raises(RuntimeError, match="404"):
        runner.run(ask())


def test_decisions_are_counted_one_by_one() -> None:
    counter = Blocks()
    workloads.placed(counter, 2, 5)
    assert counter.blocks == 5


def test_a_release_is_counted_with_the_line_full() -> None:
    counter = Blocks()
    workloads.released(counter, 40, 4, 5)
    assert counter.blocks == 5
