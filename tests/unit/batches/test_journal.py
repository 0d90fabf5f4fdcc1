"""Journals: what they have after a crash at any byte, when the disk is full, and when they are closed."""

import asyncio
import errno
import tempfile
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.resources import Holding, MemoryBudget
from gateway.core.threads import Threads
from gateway.features.batches.batch import Tally
from gateway.features.batches.folder import DurableFile, Folder
from gateway.features.batches.journal import (
    Journal,
    LineName,
    answer_line,
    on_one_line,
    tally_of,
    whole_lines,
)

GROUP = Folder.group
NAMES = st.one_of(
    st.text(min_size=1, max_size=20), st.sampled_from(['","response":', '\\","response":null', 'a"b', "\n", "\u2028"])
)


def answer(name: str, tokens: int = 7, text: str = "", place: int = 0) -> bytes:
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    return answer_line(LineName(place, "1", name), 200, "r", orjson.dumps({"text": text, "usage": usage}))


def tally(input_tokens: int, cached_tokens: int, output_tokens: int, reasoning_tokens: int) -> Tally:
    return Tally(
        1,
        input_tokens=input_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        reasoning_tokens=reasoning_tokens,
    )


def recovered(path: Path) -> list[int]:
    """The places of the lines that are whole."""
    with path.open("rb") as part:
        return [place for place, _ in whole_lines(part, lambda: None)]


@settings(deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=6, unique=True), data=st.data())
def test_after_a_crash_at_any_byte_every_whole_line_is_there_and_no_other(
    names: list[str], data: st.DataObject
) -> None:
    lines = [answer(name, text=name, place=number) for number, name in enumerate(names)]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    tail = data.draw(st.sampled_from([b"", b"\0" * 50, b"\0\n"]))
    expected = [number for number, _ in enumerate(names) if len(b"".join(lines[: number + 1])) <= cut]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        path.write_bytes(whole[:cut] + tail)
        assert recovered(path) == expected


def test_very_long_lines_are_recovered_too(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(answer("a", text="x" * 2000000) + answer("b", place=1))
    with path.open("rb") as part:
        found = [(place, tally_of(line)) for place, line in whole_lines(part, lambda: None)]
    assert found == [(0, tally(7, 2, 1, 0)), (1, tally(7, 2, 1, 0))]


def test_usage_by_the_names_of_chat_and_of_responses() -> None:
    chat = {
        "prompt_tokens": 5, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 2},
    }  # fmt: skip
    responses = {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3}
    said = {"content": '"usage":{"prompt_tokens":99}'}
    assert tally_of(orjson.dumps({"usage": chat, **said})) == tally(5, 0, 3, 2)
    assert tally_of(orjson.dumps({"usage": responses})) == tally(5, 4, 3, 0)
    assert tally_of(b'{"usage":null}') == tally_of(b"{}") == tally_of(b'"usage":[1') == Tally(1)
    assert tally_of(b'{"usage":{"prompt_tokens":-1,"completion_tokens":"9"}}') == Tally(1)


def test_an_answer_is_written_on_one_line() -> None:
    assert on_one_line(b'{\n "a": "b\\n"\r\n}') == b'{  "a": "b\\n"  }'
    assert on_one_line(b"<html>") is None
    long = b'{"a":"' + b"x" * 2000000 + b'"}'
    assert on_one_line(long) == long
    assert on_one_line(long[1:]) is None


class FullDisk:
    """A file on a disk that is full from the start; `frees` makes room."""

    def __init__(self) -> None:
        self.data = b""
        self.is_full = True
        self.refused = 0

    async def append(self, data: bytes) -> None:
        if self.is_full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data += data

    async def finish(self) -> None: ...


async def test_when_the_disk_is_full_at_most_a_group_is_accepted_and_it_goes_on_when_there_is_room() -> None:
    answers, errors = FullDisk(), FullDisk()
    reasons: list[str] = []
    journal = Journal(answers, errors, reasons.append, group=GROUP)
    appending = [asyncio.create_task(journal.append(answer(str(n)), failed=False)) for n in range(2 * GROUP.lines)]
    while not answers.refused:
        await asyncio.sleep(0.01)
    assert sum(task.done() for task in appending) == GROUP.lines
    assert reasons == ["no space is left on the disk"]
    answers.is_full = False
    await asyncio.gather(*appending)
    await journal.close()
    assert len(answers.data.splitlines()) == 2 * GROUP.lines
    assert reasons[-1] == ""


async def test_a_journal_on_a_full_disk_can_be_given_up() -> None:
    answers = FullDisk()
    journal = Journal(answers, FullDisk(), lambda _: None, group=GROUP)
    await journal.append(answer("a"), failed=False)
    await journal.close(most_seconds=0.05)
    assert answers.data == b""


async def test_answers_and_errors_go_to_files_of_their_own_and_closing_makes_all_durable(tmp_path: Path) -> None:
    answers, errors = [DurableFile(tmp_path / name, Threads("test")) for name in ("answers", "errors")]
    journal = Journal(answers, errors, lambda _: None, group=GROUP)
    for number in range(200):
        await journal.append(answer(str(number), place=number), failed=number % 2 == 1)
    await journal.close()
    assert recovered(tmp_path / "answers") == [*range(0, 200, 2)]
    assert recovered(tmp_path / "errors") == [*range(1, 200, 2)]


async def test_a_write_that_fails_half_way_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    file = DurableFile(tmp_path / "answers", Threads("test"))
    await file.append(b"one\n")
    written = os.write

    def half(number: int, data: memoryview) -> int:
        written(number, data[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            await file.append(b"two\n")
    assert (tmp_path / "answers").read_bytes() == b"one\n"
    await file.append(b"three\n")
    file.close()
    assert (tmp_path / "answers").read_bytes() == b"one\nthree\n"


async def test_what_waits_for_the_journal_holds_its_memory_until_it_has_been_written() -> None:
    budget, answers = MemoryBudget(1 << 30), FullDisk()
    journal = Journal(answers, FullDisk(), lambda _: None, group=GROUP)
    line = answer("a", text="x" * 100_000)

    async def append() -> None:
        with Holding(budget) as holding:
            holding.add(len(line))
            await journal.append(line, failed=False, holding=holding)

    appending = [asyncio.create_task(append()) for _ in range(100)]
    while not answers.refused:
        await asyncio.sleep(0.01)
    assert sum(task.done() for task in appending) * len(line) <= GROUP.size_bytes + len(line)
    assert budget.used_bytes == 100 * len(line), "of those accepted, and of those that wait"
    answers.is_full = False
    await asyncio.gather(*appending)
    await journal.close()
    assert (budget.used_bytes, len(answers.data)) == (0, 100 * len(line))


async def test_a_journal_that_is_given_up_gives_its_memory_back() -> None:
    budget = MemoryBudget(1 << 30)
    journal = Journal(FullDisk(), FullDisk(), lambda _: None, group=GROUP)
    for text in ("being written", "accepted"):
        with Holding(budget) as holding:
            holding.add(1000)
            await journal.append(answer(text), failed=False, holding=holding)
    assert budget.used_bytes == 2000
    await journal.close(most_seconds=0.05)
    assert budget.used_bytes == 0
