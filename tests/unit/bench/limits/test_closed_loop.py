from dataclasses import replace

from gateway.core.backends.concurrency_limit import Limiter
from tests.bench.limits.closed_loop import ClosedLoop, Crowd, static

CROWD = Crowd("c", prompt_tokens=500, output_tokens=200, kv_tokens=100_000, max_num_seqs=16, users=100)


def test_a_static_limit_is_used_up_and_never_passed() -> None:
    course = ClosedLoop(CROWD, static(20), 1).run(20.0, 60.0)
    assert set(course.limit) == {20}
    assert set(course.waiting) == {4}
    assert course.preemptions == 0


def test_throughput_is_that_of_the_batch() -> None:
    half, whole = (ClosedLoop(CROWD, static(limit), 1).run(20.0, 60.0).tokens_per_second for limit in (8, 16))
    assert 1.5 * half < whole < 2 * half


def test_too_small_a_kv_cache_makes_the_engine_preempt() -> None:
    small = replace(CROWD, kv_tokens=6_000)
    assert ClosedLoop(small, static(16), 1).run(20.0, 60.0).preemptions > 10


def test_the_same_seed_gives_the_same_course() -> None:
    one, two = (ClosedLoop(CROWD, Limiter(), 3).run(20.0, 60.0) for _ in range(2))
    assert one == two


def test_late_metrics_reach_the_limiter_later() -> None:
    courses = [ClosedLoop(replace(CROWD, late_looks=late), Limiter(), 1).run(0.0, 20.0) for late in (0, 3)]
    first_falls = [next(turn for turn, limit in enumerate(course.limit) if limit < 256) for course in courses]
    assert first_falls[1] - first_falls[0] == 3
