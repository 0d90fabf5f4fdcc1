"""Parts of several gateways: put together, each line is there once, however often it was run."""

import io

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.features.batches.input import CheckedInput
from gateway.features.batches.journal import answer_line
from gateway.features.batches.parts import JoinedParts, next_piece

LINES = 6


def checked() -> CheckedInput:
    found = CheckedInput(model="m")
    for number in range(LINES):
        found.index.add(number, 1)
        found.places[hash(str(number))] = number
    return found


def answer(number: int, holder: str, status: int = 200) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": 1}
    return answer_line(f"{number}{holder}", str(number), status, "r", orjson.dumps({"usage": usage}))


def put_together(joined: JoinedParts, parts: bytes, *, failed: bool) -> list[int]:
    """The custom ids of the lines that are taken from these parts."""
    return [int(orjson.loads(line)["custom_id"]) for line in joined.lines(io.BytesIO(parts), failed=failed)]


@settings(deadline=None)
@given(runs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, LINES - 1), st.booleans()), max_size=20))
def test_each_line_is_there_once(runs: list[tuple[int, int, bool]]) -> None:
    output = b"".join(answer(number, str(holder)) for holder, number, failed in runs if not failed)
    error = b"".join(answer(number, str(holder), 400) for holder, number, failed in runs if failed)
    joined = JoinedParts(checked(), lambda: None)
    answers, errors = put_together(joined, output, failed=False), put_together(joined, error, failed=True)
    completed = {number for _, number, failed in runs if not failed}
    done = {number for _, number, _ in runs}
    assert sorted(answers) == sorted(completed)
    assert sorted(errors) == sorted(done - completed)
    assert joined.missing() == sorted(set(range(LINES)) - done)
    assert joined.answered(2, 5) == [number - 2 for number in sorted(done) if 2 <= number < 5]
    tally = joined.tally
    assert (tally.completed, tally.failed, tally.input_tokens) == (len(answers), len(errors), 5 * len(answers))


def test_answers_to_lines_that_the_input_does_not_have_are_left_out() -> None:
    joined = JoinedParts(checked(), lambda: None)
    assert put_together(joined, answer(99, "a") + answer(2, "a"), failed=False) == [2]


def test_lines_are_written_in_large_pieces() -> None:
    lines = iter([b"x" * 400000] * 5)
    assert [len(next_piece(lines)) for _ in range(3)] == [1200000, 800000, 0]
