"""A checkpoint that holds, and one thing after another that does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from loadtest.checkpoint.document import Checkpoint, Status, failed
from loadtest.checkpoint.recheck import differences, read_files, recheck

# Made when a request in one read kept a bound on TPOT, goodput was of the whole run, and ITL did not bound the lag.
_FIRST_DEFINITIONS = Path(__file__).with_name("archive_of_first_definitions")


def wrong(folder: Path) -> dict[str, tuple[str, str]]:
    """(expected, found) of what does not hold, by name."""
    made = Checkpoint.model_validate_json((folder / "checkpoint.json").read_bytes())
    checks = recheck(made, folder, read_files(folder))
    return {check.name: (check.expected, check.found) for check in failed(checks)}


def edit(file: Path, change: Callable[[dict[str, object]], None]) -> None:
    document = orjson.loads(file.read_bytes())
    change(document)
    file.write_bytes(orjson.dumps(document))


def edit_line(file: Path, number: int, **fields: object) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    lines[number] = orjson.dumps(orjson.loads(lines[number]) | fields, option=orjson.OPT_APPEND_NEWLINE)
    file.write_bytes(b"".join(lines))


def test_a_run_that_nobody_touched_holds(kept: Path) -> None:
    assert wrong(kept) == {}


def test_an_archive_of_older_definitions_holds_and_names_the_figures_that_mean_something_else_today() -> None:
    made = Checkpoint.model_validate_json((_FIRST_DEFINITIONS / "checkpoint.json").read_bytes())
    checks = {check.name: check for check in recheck(made, _FIRST_DEFINITIONS, read_files(_FIRST_DEFINITIONS))}
    assert failed(list(checks.values())) == []
    assert checks["figures"].status is Status.OK
    named = checks["figures defined otherwise today"]
    assert named.status is Status.NOT_CHECKED
    for figure in ("slo.goodput_per_second", "slo.attainment", "verdict.passed"):
        assert figure in named.why
    assert "definition 1 in the file, 2 today" in named.why


def test_a_figure_of_an_older_archive_whose_definition_is_still_that_one_must_follow(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(_FIRST_DEFINITIONS, folder)
    edit_line(folder / "requests.jsonl", 3, completion_tokens=500)
    found = wrong(folder)
    assert found["figures: tokens.completion"] == ("588, by requests.jsonl", "99")


def test_a_changed_line_is_found_in_its_hash_and_in_every_figure_that_it_moves(kept: Path) -> None:
    edit_line(kept / "requests.jsonl", 3, completion_tokens=500)
    found = wrong(kept)
    assert "sha256 of requests.jsonl" in found
    assert found["figures: tokens.completion"] == ("588, by requests.jsonl", "99")
    assert "figures: latency.tpot.mean" in found


def test_a_line_that_is_left_out_is_found(kept: Path) -> None:
    file = kept / "requests.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    found = wrong(kept)
    assert found["figures: requests.offered"] == ("8, by requests.jsonl", "9")
    assert found["workload: requests"] == ("8, by results.json and requests.jsonl", "9")
    assert "workload: sent_sha256" in found


def test_another_body_than_the_workloads_is_found(kept: Path) -> None:
    edit_line(kept / "requests.jsonl", 2, body_hash="0" * 32)
    assert wrong(kept)["prompts follow from workload and seed"] == ("9 of 9", "8 of 9; not request 2")


def test_a_figure_that_is_changed_in_the_results_is_found_by_the_requests_and_by_the_summary(kept: Path) -> None:
    def faster(document: dict[str, object]) -> None:
        document["tokens"]["completion"] = 990  # type: ignore[index]

    edit(kept / "results.json", faster)
    found = wrong(kept)
    assert found["figures: tokens.completion"] == ("99, by requests.jsonl", "990")
    assert found["summary: completion_tokens"] == ("990, by results.json", "99")
    assert "sha256 of results.json" in found


def test_a_verdict_that_does_not_follow_from_the_figures_is_found(kept: Path) -> None:
    def fail_one(document: dict[str, object]) -> None:
        document["verdict"] |= {"passed": False, "reasons": ["nobody likes it"]}  # type: ignore[operator]

    edit(kept / "results.json", fail_one)
    found = wrong(kept)
    assert found["figures: verdict.passed"] == ("True, by requests.jsonl", "False")
    assert found["passed"] == ("False, by verdict and checks", "True")


@pytest.mark.parametrize(("field", "value"), [("passed", False), ("id", "another")])
def test_a_checkpoint_that_is_changed_says_other_than_its_page(kept: Path, field: str, value: object) -> None:
    edit(kept / "checkpoint.json", lambda document: document.update({field: value}))
    assert wrong(kept)["checkpoint.md"] == ("says what checkpoint.json says", "it says something else")


def test_files_that_are_gone_or_no_files_of_a_run_are_named(kept: Path) -> None:
    (kept / "report.html").unlink()
    (kept / "requests.jsonl").write_text('{"index": 1}\n')
    found = wrong(kept)
    assert found["sha256 of report.html"][1] == "No such file or directory"
    assert "schema of requests.jsonl" in found
    (kept / "results.json").write_text("{}")
    assert "schema of results.json" in wrong(kept)


def test_what_was_verified_comes_out_again(kept: Path) -> None:
    made = Checkpoint.model_validate_json((kept / "checkpoint.json").read_bytes())
    files = read_files(kept)
    check = made.checks[0].model_copy(
        update={"name": "usage sums", "status": Status.OK, "found": "1 + 1 by the engines"}
    )
    told = {each.name: each for each in recheck(made.model_copy(update={"checks": [check]}), kept, files)}
    assert told["usage sums, again"].status is Status.FAILED
    assert told["usage sums, again"].found == "ok: 1 + 1 by the engines"


def test_differences_are_named_by_their_path() -> None:
    one = {"a": {"b": [1, 2]}, "c": 1}
    assert list(differences(one, {"a": {"b": [1, 3]}, "d": 2})) == [
        ("a.b[1]", "2", "3"), ("c", "1", "absent"), ("d", "absent", "2"),
    ]  # fmt: skip
    assert list(differences([1], [1, 2])) == [("", "[1]", "[1, 2]")]
