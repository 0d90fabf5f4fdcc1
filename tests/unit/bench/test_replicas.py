"""Which bars several gateways miss against a single one."""

from tests.bench.replicas import Arm, Seen, problems


def seen(arm: Arm, cached: int, answers: int, failed: int = 0) -> Seen:
    return Seen(arm, 1000, cached, [1.0] * answers, failed, seconds=10.0, cpu_seconds=1.0)


ONE, TWO = Arm(1, shares=True), Arm(2, shares=True)


def test_gateways_that_are_nearly_as_good_as_one_miss_nothing() -> None:
    assert problems([seen(ONE, 800, 100), seen(TWO, 780, 98)]) == []


def test_a_lower_hit_rate_or_throughput_is_a_problem() -> None:
    assert problems([seen(ONE, 800, 100), seen(TWO, 700, 90)]) == [
        "2, coordinated: hit rate is 87.5% of a single gateway's",
        "2, coordinated: throughput is 90.0% of a single gateway's",
    ]


def test_gateways_that_are_not_coordinated_are_only_shown() -> None:
    assert problems([seen(ONE, 800, 100), seen(Arm(2, shares=False), 400, 50)]) == []


def test_a_failed_request_is_a_problem() -> None:
    assert problems([seen(ONE, 800, 100, failed=1)]) == ["1: 1 requests failed"]


def test_a_row_has_the_figures() -> None:
    assert seen(TWO, 800, 100).row() == "| 2, coordinated | 100 | 80.0% | 10.0 | 1000 | 10.00 | 100.0 | 0 |"


def test_gateways_that_do_nothing_spend_no_time_on_requests() -> None:
    assert seen(TWO, 0, 0).row() == "| 2, coordinated | 0 | 0.0% | 0.0 | 0 | - | 100.0 | 0 |"
