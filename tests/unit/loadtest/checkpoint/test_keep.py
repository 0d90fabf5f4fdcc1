"""What a run leaves behind."""

import hashlib
from pathlib import Path

from loadtest.checkpoint.document import Checkpoint, Status, failed
from loadtest.checkpoint.markdown import markdown
from tests.unit.loadtest.checkpoint.conftest import keep


def read(folder: Path) -> Checkpoint:
    return Checkpoint.model_validate_json((folder / "checkpoint.json").read_bytes())


def test_a_checkpoint_names_every_file_and_the_figures_of_the_run(kept: Path) -> None:
    made = read(kept)
    assert set(made.artefacts) >= {"results.json", "requests.jsonl", "report.html"}
    assert (made.summary.offered, made.summary.prompt_tokens, made.summary.completion_tokens) == (9, 900, 99)
    assert (made.workload.seed, made.workload.requests) == (7, 9)
    assert made.passed


def test_the_page_of_the_run_has_its_checks_and_its_hash_is_the_kept_one(kept: Path) -> None:
    page = (kept / "report.html").read_bytes()
    assert b"1 not checked" in page
    assert read(kept).artefacts["report.html"] == hashlib.sha256(page).hexdigest()


def test_what_is_not_verified_is_not_passed_in_silence(kept: Path) -> None:
    [check] = read(kept).checks
    assert (check.status, check.why) == (Status.NOT_CHECKED, "--no-verify")
    assert "not checked" in (kept / "checkpoint.md").read_text()


def test_a_check_that_failed_fails_the_run(tmp_path: Path) -> None:
    made = read(keep(tmp_path, verify=True))
    assert {check.name for check in failed(made.checks)} >= {"health of gateway", "answers"}
    assert made.summary.passed
    assert not made.passed


def test_a_run_that_was_ended_by_hand_is_not_verified(tmp_path: Path) -> None:
    [check] = read(keep(tmp_path, verify=True, ended_early=True)).checks
    assert (check.status, check.why) == (Status.NOT_CHECKED, "the run was ended by hand")


def test_the_page_says_what_the_document_says_and_breaks_no_table(kept: Path) -> None:
    made = read(kept)
    assert (kept / "checkpoint.md").read_text() == markdown(made)
    check = made.checks[0].model_copy(update={"status": Status.FAILED, "found": "a | b\nc"})
    page = markdown(made.model_copy(update={"checks": [check], "passed": False}))
    assert "| **FAILED** |  | a \\| b c |" in page
    assert page.startswith(f"# Checkpoint {made.id}: FAILED")


def test_a_user_in_the_url_is_reported_nowhere(tmp_path: Path) -> None:
    folder = keep(tmp_path, verify=True, url="http://me:s3cr3t@127.0.0.1:1")
    for file in folder.iterdir():
        assert "s3cr3t" not in file.read_text(), file.name
    made = read(folder)
    assert {server.url for server in made.servers} == {"http://***@127.0.0.1:1"}
