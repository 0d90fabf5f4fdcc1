"""What is made of the samples of an overload run."""

import pytest

from tests.bench.overload.report import cpu_us_per_refusal, markdown, problems
from tests.bench.results import Sample
from tests.unit.bench.builders import make_sample

UNREFUSED = make_sample(proxy_cpu_seconds=1.0, requests=1000)


def overloaded(*, requests: int = 1000, cpu: float = 2.0, p99_us: float = 5000, errors: int = 0) -> Sample:
    return make_sample(
        proxy_cpu_seconds=cpu, requests=requests, refused=10_000, refusal_p99_us=p99_us, errors={"lost": errors}
    )


def test_a_refusal_costs_what_was_spent_beyond_what_was_served() -> None:
    assert cpu_us_per_refusal(overloaded(), UNREFUSED) == pytest.approx(100)
    assert cpu_us_per_refusal(overloaded(requests=500), UNREFUSED) == pytest.approx(150)
    assert cpu_us_per_refusal(UNREFUSED, UNREFUSED) is None


def test_the_table_has_a_line_for_each_load() -> None:
    lines = markdown({1: UNREFUSED, 10: overloaded(requests=990)}).split("\n")
    assert lines[2] == "| 1 | 333 | 333 | 100.0% | 0 |  |  | 0 | 33% / 0% |"
    assert lines[3].startswith("| 10 | 3,663 | 330 | 99.0% | 3,333 | 0.1 / 5.0 | 0.101 | ")


def test_a_run_that_meets_every_goal_has_no_problems() -> None:
    assert problems({1: UNREFUSED, 10: overloaded()}) == []


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (overloaded(requests=940), "served 94.0% of the best, not 95%"),
        (overloaded(cpu=20.0), "a refusal cost 1.90 ms of CPU, not 1"),
        (overloaded(p99_us=60_000), "p99 of refusals 60 ms, not 50"),
        (overloaded(errors=3), "3 errors, the first: lost: closed"),
    ],
)
def test_a_goal_that_is_missed_is_told(sample: Sample, told: str) -> None:
    assert problems({1: UNREFUSED, 10: sample}) == [f"10 x: {told}"]
