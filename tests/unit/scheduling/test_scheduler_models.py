"""Several models behind one gateway: what one teaches is of no use for another."""

from typing import Any

import pytest

from gateway.core.feedback import Learning
from gateway.core.request import Usage
from gateway.core.routing.cache_view import HitAccuracy
from gateway.core.routing.engine import Parts
from gateway.core.scheduling.scheduler import Lease
from tests.unit.scheduling.builders import Hall, ask, hall


def two_models() -> Hall:
    """Backend a serves the small model `m`, backend b the large one `big`."""
    here = hall(4, 4, policy="prefix")
    a, b = here.sites
    here.serving.update(m=[a], big=[b])
    here.changed()
    return here


def answer(here: Hall, model: str, first_token_seconds: float, output_tokens: int) -> None:
    """A request of 1,000 tokens that is alone."""
    placed = here.scheduler.place(ask(model=model, prompt_tokens=1000), here.now)
    assert isinstance(placed, Lease)
    here.now += first_token_seconds
    here.scheduler.first_token(placed, here.now)
    here.scheduler.release(placed, here.now, answered=True)
    Learning(here.estimates, here.index, HitAccuracy()).answered(placed.demand, 0, 0, Usage(1000, output_tokens))


def cost(here: Hall, model: str) -> Parts:
    """What a request costs on an idle engine of the model."""
    [verdict] = here.scheduler.explain(ask(model=model, prompt_tokens=1000), here.now + 1000.0)
    assert verdict.parts is not None
    return verdict.parts


def alike(parts: Parts) -> Any:
    """The same, as exactly as clocks that began at different times allow."""
    return pytest.approx(parts, rel=1e-6, abs=1e-9)


def test_a_large_model_changes_no_cost_of_a_small_one() -> None:
    here = two_models()
    for _ in range(50):
        answer(here, "m", 0.03, 100)
    before = cost(here, "m")
    for _ in range(50):
        answer(here, "big", 3.0, 4000)
    assert cost(here, "m") == alike(before)


def test_each_model_is_learned_as_if_it_were_alone() -> None:
    both, small, large = two_models(), two_models(), two_models()
    for _ in range(50):
        for here in (both, small):
            answer(here, "m", 0.03, 100)
        for here in (both, large):
            answer(here, "big", 3.0, 4000)
    assert cost(both, "m") == alike(cost(small, "m"))
    assert cost(both, "big") == alike(cost(large, "big"))
    assert cost(both, "big").prefill > 20 * cost(both, "m").prefill
    assert both.estimates.expected_output_tokens("big", None) == pytest.approx(4000)
    assert both.estimates.expected_output_tokens("m", None) == pytest.approx(100)
