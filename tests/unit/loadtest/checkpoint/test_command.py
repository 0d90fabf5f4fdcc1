"""`loadtest verify` as users call it."""

from pathlib import Path

from typer.testing import CliRunner

from loadtest.__main__ import app


def verify(*arguments: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["verify", *arguments])
    return ended.exit_code, ended.output


def test_what_holds_ends_with_0_and_servers_that_are_gone_are_reported(kept: Path) -> None:
    code, output = verify(str(kept / "checkpoint.json"))
    assert code == 0, output
    assert "all that was checked holds" in output


def test_a_folder_is_searched_for_checkpoints(kept: Path) -> None:
    code, output = verify(str(kept.parent), "--offline")
    assert code == 0, output
    assert "not checked  servers: --offline" in output


def test_what_does_not_hold_is_named_and_ends_with_1(kept: Path) -> None:
    with (kept / "report.html").open("a") as page:
        page.write("<!-- faster -->")
    code, output = verify(str(kept), "--offline")
    assert code == 1
    assert "FAILED       sha256 of report.html: expected " in output
    assert "1 thing not as it should be" in output


def test_a_target_that_was_named_must_be_there(kept: Path) -> None:
    code, output = verify(str(kept), "--targets", "gateway=http://127.0.0.1:1")
    assert code == 1
    assert "FAILED       gateway at http://127.0.0.1:1: expected an answer" in output


def test_what_is_no_checkpoint_ends_with_1(kept: Path) -> None:
    (kept / "checkpoint.json").write_text("{}")
    code, output = verify(str(kept))
    assert code == 1
    assert "schema" in output


def test_wrong_usage_ends_with_2(kept: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments in (
        [str(kept), "--targets", "nobody=http://x"],
        [str(kept), "--targets", "a=http://x", "--offline"],
        [str(empty)],
        [str(tmp_path / "gone")],
        [],
    ):
        assert verify(*arguments)[0] == 2
