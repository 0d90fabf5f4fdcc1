"""Looking at many at once finds what looking at one after another finds."""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request import Demand
from gateway.routing.cost_matrix import CostMatrix
from gateway.routing.engine import CostModel, Engine
from gateway.routing.estimates import Calibration, OutputLengths
from gateway.scheduling.admission import Capacity, QueueScan
from gateway.scheduling.wait_queue import Ticket
from tests.unit.routing.crowds import ASKS, MODELS, NOW, AskedFor, engines, work

STARVATION_SECONDS = 30.0
WAITS = st.sampled_from([0.0, 1.0, 31.0])


class OneAfterAnother(CostMatrix):
    """The same costs, without short cuts."""

    def skip(self, row: int, is_open: Sequence[bool]) -> int:
        return row


def look_through(
    matrix: type[CostMatrix], model: CostModel, asks: list[AskedFor], waits: list[float], closed: set[tuple[int, int]],
    among: list[Engine],
) -> list[tuple[int, int]]:  # fmt: skip
    """The engine of each bound ticket."""
    hits = [np.array(hits[: len(among)], dtype=np.float64) for _, _, hits in asks]
    ranking = matrix(model, [ask[0] for ask in asks], [ask[1] for ask in asks], hits, among, NOW)
    for row, column in closed:
        if row < len(asks) and column < len(among):
            ranking.close(column, row)
    capacity = Capacity(Calibration(model, 0.1), OutputLengths())
    bound: list[tuple[int, int]] = []
    tickets = [
        Ticket(Demand("m", prompt_tokens=prompt, output_tokens=int(output)), NOW - waited, frozenset(), 0.0)
        for (prompt, output, _), waited in zip(asks, waits, strict=False)
    ]

    def bind(ticket: Ticket, column: int, prefill_seconds: float) -> None:
        bound.append((tickets.index(ticket), column))
        started = work(1, ticket.demand.prompt_tokens, prefill_seconds, observable=True)
        among[column].load.start(started, NOW)

    is_open = [capacity.is_open(engine, NOW) for engine in among]
    QueueScan(among, ranking, is_open, capacity, STARVATION_SECONDS, True, bind).run(tickets, NOW)
    return bound


@settings(max_examples=200, deadline=None)
@given(
    model=MODELS,
    asks=st.lists(ASKS, min_size=1, max_size=20),
    again=st.integers(1, 6),
    waits=st.lists(WAITS, min_size=120, max_size=120).map(lambda waits: sorted(waits, reverse=True)),
    closed=st.sets(st.tuples(st.integers(0, 119), st.integers(0, 4)), max_size=20),
    among=engines(),
)
def test_skipping_requests_that_keep_waiting_changes_no_decision(
    model: CostModel, asks: list[AskedFor], again: int, waits: list[float], closed: set[tuple[int, int]],
    among: list[Engine],
) -> None:  # fmt: skip
    asks = asks * again
    slowly = look_through(OneAfterAnother, model, asks, waits, closed, deepcopy(among))
    assert look_through(CostMatrix, model, asks, waits, closed, deepcopy(among)) == slowly
    assert len({row for row, _ in slowly}) == len(slowly)
