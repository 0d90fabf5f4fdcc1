from itertools import pairwise

from gateway.insights.samples import Limits, Samples
from gateway.observe.record import Record
from gateway.request import Ask

LIMITS = Limits(per_second=2.0, burst=3, samples=4, total_bytes=100, text_bytes=40)


def ask(size: int = 10) -> Ask:
    return Ask("m", keys=(1,), edges=(size,), prompt_size=size, prompt_tokens=5)


def test_a_burst_is_taken_and_then_so_many_a_second() -> None:
    samples = Samples(0.0, LIMITS)
    taken = []
    for step in range(40):
        now = step / 10
        if samples.wants(now):
            samples.add([b"x"], ask(), "", "", now)
            taken.append(now)
    assert taken[:3] == [0.0, 0.1, 0.2]
    assert 6 <= len(taken[3:]) <= 8
    assert all(later - earlier >= 0.49 for earlier, later in pairwise(taken[3:]))


def test_a_bucket_that_was_full_for_long_gives_no_more_than_a_burst() -> None:
    samples = Samples(0.0, LIMITS)
    taken = 0
    for _ in range(10):
        if samples.wants(1000.0):
            samples.add([b"x"], ask(), "", "", 1000.0)
            taken += 1
    assert taken == 3


def test_a_sample_stands_for_the_requests_since_the_one_before() -> None:
    samples = Samples(0.0, LIMITS)
    for step in range(100):
        now = step / 50
        if samples.wants(now):
            samples.add([b"x"], ask(), "", "", now)
    kept = samples.snapshot(0.0)
    assert [sample.weight for sample in kept[-2:]] == [25, 25]


def test_the_oldest_are_forgotten_beyond_the_number_and_the_bytes() -> None:
    samples = Samples(0.0, LIMITS)
    for number in range(6):
        samples.add([bytes([65 + number])], ask(), "", "", float(number))
    assert [sample.text for sample in samples.snapshot(0.0)] == [b"C", b"D", b"E", b"F"]
    for _ in range(3):
        samples.add([b"y" * 30, b"z" * 30], ask(), "", "", 9.0)
    assert samples.held_bytes == 80
    assert [sample.text for sample in samples.snapshot(0.0)] == [b"y" * 30 + b"z" * 10] * 2
    assert repr(samples) == "<Samples 2, 80 bytes, 4 open>"


def test_what_became_of_a_request_is_learned() -> None:
    samples = Samples(0.0, LIMITS)
    asked = ask()
    samples.add([b"x"], asked, "team", "shop", 1.0)
    before = samples.snapshot(0.0)
    record = Record("id", "chat", 1.0)
    record.prompt_tokens, record.predicted_hit_tokens, record.actual_hit_tokens = 7, 4, 3
    samples.finished(record, ask())  # equal, but another request
    assert not samples.snapshot(0.0)[0].told
    samples.finished(record, asked)
    (sample,) = samples.snapshot(0.0)
    assert (sample.told, sample.prompt_tokens, sample.hit_tokens) == (True, 7, 3)
    assert not before[0].told
    assert repr(samples).endswith("0 open>")


def test_an_empty_prompt_and_what_is_too_old_are_left_out() -> None:
    samples = Samples(0.0, LIMITS)
    samples.add([], ask(), "", "", 1.0)
    samples.add([b"old"], ask(), "", "", 1.0)
    samples.add([b"new"], ask(), "", "", 5.0)
    assert [sample.text for sample in samples.snapshot(2.0)] == [b"new"]
