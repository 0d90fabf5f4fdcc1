"""Parts of several gateways: put together, each line is there once, however often it was run."""

import io

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.features.batches.journal import LineName, answer_line
from gateway.features.batches.parts import JoinedParts, next_piece

LINES = 6


def joined_parts(wanted: range = range(LINES)) -> JoinedParts:
    return JoinedParts(wanted, lambda: None)


def answer(number: int, holder: str, status: int = 200) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": 1}
    return answer_line(LineName(number, holder, str(number)), status, "r", orjson.dumps({"usage": usage}))


def put_together(joined: JoinedParts, parts: bytes, *, failed: bool) -> list[int]:
    """The custom ids of the lines that are taken from these parts."""
    return [int(orjson.loads(line)["custom_id"]) for line in joined.lines([io.BytesIO(parts)], failed=failed)]


@settings(deadline=None)
@given(runs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, LINES - 1), st.booleans()), max_size=20))
def test_each_line_is_there_once(runs: list[tuple[int, int, bool]]) -> None:
    output = b"".join(answer(number, str(holder)) for holder, number, failed in runs if not failed)
    error = b"".join(answer(number, str(holder), 400) for holder, number, failed in runs if failed)
    joined = joined_parts()
    answers, errors = put_together(joined, output, failed=False), put_together(joined, error, failed=True)
    completed = {number for _, number, failed in runs if not failed}
    done = {number for _, number, _ in runs}
    assert sorted(answers) == sorted(completed)
    assert sorted(errors) == sorted(done - completed)
    assert joined.missing() == sorted(set(range(LINES)) - done)
    some = joined_parts(range(2, 5))
    assert put_together(some, output, failed=False) == [number for number in answers if 2 <= number < 5]
    assert [*some.has] == [number in completed for number in range(2, 5)]
    assert some.tally.lines == sum(some.has)
    tally = joined.tally
    assert (tally.completed, tally.failed, tally.input_tokens) == (len(answers), len(errors), 5 * len(answers))


def test_answers_to_lines_that_the_input_does_not_have_are_left_out() -> None:
    joined = joined_parts()
    assert put_together(joined, answer(99, "a") + answer(2, "a"), failed=False) == [2]


def test_of_several_parts_the_first_answer_counts_and_what_is_torn_is_passed_over() -> None:
    joined = joined_parts()
    parts = [answer(2, "a") + answer(3, "a")[:-20], answer(2, "b") + b"\0\n" + answer(3, "b")]
    found = [*joined.lines([*map(io.BytesIO, parts)], failed=False)]
    assert found == [answer(2, "a"), answer(3, "b")]


def test_lines_are_written_in_large_pieces() -> None:
    lines = iter([b"x" * 400000] * 5)
    assert [len(next_piece(lines)) for _ in range(3)] == [1200000, 800000, 0]
