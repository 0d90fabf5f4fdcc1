"""Parts of several gateways: put together, each line is there once, however often it was run."""

import io
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batches.batch import Tally
from gateway.batches.input import CheckedInput
from gateway.batches.journal import answer_line
from gateway.batches.parts import AnswerParts, delete_parts

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


def put_together(folder: Path, holders: list[str]) -> tuple[list[str], list[str], Tally, list[int]]:
    """The custom ids of answers and errors, what was counted, and what is missing."""
    targets = io.BytesIO(), io.BytesIO()
    tally, missing = AnswerParts(folder, lambda: None).put_together(holders, checked(), targets)
    answers, errors = ([orjson.loads(line)["custom_id"] for line in each.getvalue().splitlines()] for each in targets)
    return answers, errors, tally, missing


@settings(deadline=None)
@given(
    runs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, LINES - 1), st.booleans()), max_size=20),
    torn=st.integers(0, 60),
)
def test_each_line_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[str, int, bool]], torn: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    parts = AnswerParts(folder, lambda: None)
    for holder, number, failed in runs:
        with parts.path(holder, "error" if failed else "output").open("ab") as part:
            part.write(answer(number, holder, 400 if failed else 200))
    with parts.path("a", "output").open("ab") as part:
        part.write(answer(0, "a")[:torn])  # this gateway was killed
    answers, errors, tally, missing = put_together(folder, ["a", "b", "c", "d"])
    completed = {number for _, number, failed in runs if not failed}
    assert sorted(map(int, answers)) == sorted(completed)
    assert sorted(map(int, errors)) == sorted({number for _, number, failed in runs if failed} - completed)
    assert missing == sorted(set(range(LINES)) - {number for _, number, _ in runs})
    assert (tally.completed, tally.failed, tally.input_tokens) == (len(answers), len(errors), 5 * len(answers))
    assert parts.answered(["a", "b", "c", "d"], checked()) == {number for _, number, _ in runs}


def test_answers_to_lines_that_the_input_does_not_have_are_left_out(tmp_path: Path) -> None:
    AnswerParts(tmp_path, lambda: None).path("a", "output").write_bytes(answer(99, "a") + answer(2, "a"))
    assert put_together(tmp_path, ["a"])[0] == ["2"]


def test_parts_of_batches_that_have_ended_are_deleted(tmp_path: Path) -> None:
    for name in ("ended", "running"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    delete_parts(tmp_path, ["ended", "gone"])
    assert [each.name for each in tmp_path.iterdir()] == ["running"]
