from gateway.config import ServerConfig
from tests.bench.bodies_stall import HEAD, bodies, measure

SMALL = ServerConfig(max_body_bytes=8192, max_json_strings=400, max_json_containers=300, max_json_values=500)


def test_every_body_is_within_the_limits_and_read_to_its_end_or_refused_for_what_it_says() -> None:
    timings = list(measure(SMALL))
    assert len(timings) == len(list(bodies()))
    assert all(0 < timing.size_bytes <= 8192 for timing in timings)
    assert all(0 < timing.longest_ms <= timing.all_ms for timing in timings)


def test_bodies_can_be_chosen_by_name() -> None:
    timings = list(measure(SMALL, "one image"))
    assert [timing.name for timing in timings] == ["one image"]
    assert timings[0].row().count("|") == HEAD.splitlines()[0].count("|")
