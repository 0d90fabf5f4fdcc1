import asyncio

import pytest

from gateway.observe.metrics import Histogram, watch_lag
from tests.unit.scheduling.virtual_time import VirtualLoop, run


def lag() -> Histogram:
    return Histogram("gateway_event_loop_lag_seconds", "", (), (0.001, 0.25, 1.0))


async def watched(histogram: Histogram, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await watch_lag(histogram)


def test_a_free_loop_shows_ten_samples_a_second_without_lag() -> None:
    histogram = lag()
    run(watched(histogram, 1.05))
    [(counts, total)] = histogram.values.values()
    assert counts == [10, 0, 0, 0]
    assert total[0] == pytest.approx(0.0, abs=1e-6)


def test_a_loop_that_is_held_up_shows_by_how_much() -> None:
    histogram = lag()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_later(0.05, loop.hold_up, 0.35)
        await watched(histogram, 0.45)

    run(main())
    [(counts, total)] = histogram.values.values()
    assert counts == [0, 0, 1, 0]
    assert total[0] == pytest.approx(0.3)
