"""A checkpoint that holds, and one thing after another that does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from loadtest.checkpoint.command import differences, read_files, recheck
from loadtest.checkpoint.document import Checkpoint, Status, failed

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


def test_a_run_that_is_unchanged_holds(kept: Path) -> None:
    assert wrong(kept) == {}


def test_an_archive_of_older_definitions_holds_and_they_are_named() -> None:
    made = Checkpoint.model_validate_json((_FIRST_DEFINITIONS / "checkpoint.json").read_bytes())
    checks = recheck(made, _FIRST_DEFINITIONS, read_files(_FIRST_DEFINITIONS))
    assert failed(checks) == []
    (definitions,) = [check for check in checks if check.name == "definitions"]
    assert definitions.status is Status.OK
    for older in ("slo 1 (now 2)", "slo.goodput_per_second 1 (now 2)", "verdict 1 (now 2)"):
        assert older in definitions.found


@pytest.mark.parametrize("unknown", [{"latency": 99}, {"latency": 0}, {"no_such_figure": 1}])
def test_a_definition_that_this_version_does_not_know_is_found(kept: Path, unknown: dict[str, int]) -> None:
    edit(kept / "results.json", lambda document: document["definitions"].update(unknown))  # type: ignore[attr-defined]
    ((name, version),) = unknown.items()
    assert wrong(kept)["definitions"] == ("versions that this loadtest knows", f"unknown: {name} {version}")


def test_a_changed_line_is_found_by_the_hash_alone(kept: Path) -> None:
    edit_line(kept / "requests.jsonl", 3, completion_tokens=500)
    assert wrong(kept).keys() == {"sha256 of requests.jsonl"}


@pytest.mark.parametrize("name", ["results.json", "requests.jsonl"])
def test_a_checkpoint_without_the_hash_of_a_file_is_not_complete(kept: Path, name: str) -> None:
    edit(kept / "checkpoint.json", lambda document: document["artefacts"].pop(name))  # type: ignore[attr-defined]
    assert wrong(kept)[f"sha256 of {name}"] == ("a hash in checkpoint.json", "none")


def test_a_line_that_is_left_out_is_found(kept: Path) -> None:
    file = kept / "requests.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    found = wrong(kept)
    assert "sha256 of requests.jsonl" in found
    assert found["workload: requests"] == ("8, by results.json and requests.jsonl", "9")
    assert "workload: sent_sha256" in found


def test_a_figure_that_is_changed_in_the_results_is_found_by_the_hash_and_the_summary(kept: Path) -> None:
    def faster(document: dict[str, object]) -> None:
        document["tokens"]["completion"] = 990  # type: ignore[index]

    edit(kept / "results.json", faster)
    found = wrong(kept)
    assert found["summary: completion_tokens"] == ("990, by results.json", "99")
    assert "sha256 of results.json" in found


def test_a_verdict_that_is_changed_in_the_results_is_found(kept: Path) -> None:
    def fail_one(document: dict[str, object]) -> None:
        document["verdict"] |= {"passed": False, "reasons": ["nobody likes it"]}  # type: ignore[operator]

    edit(kept / "results.json", fail_one)
    found = wrong(kept)
    assert found["summary: passed"] == ("False, by results.json", "True")
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


def test_differences_are_named_by_their_path() -> None:
    one = {"a": {"b": [1, 2]}, "c": 1}
    assert list(differences(one, {"a": {"b": [1, 3]}, "d": 2})) == [
        ("a.b[1]", "2", "3"),
        ("c", "1", "absent"),
        ("d", "absent", "2"),
    ]
    assert list(differences([1], [1, 2])) == [("", "[1]", "[1, 2]")]
