"""The table of hostile inputs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.config import ServerConfig
from tests.bench.__main__ import app
from tests.bench.bounds import bodies, command
from tests.bench.bounds.cases import CASES, MEBIBYTE, Case
from tests.bench.bounds.command import Row, line


def row(**fields: object) -> Row:
    """A row of the table."""
    plain = {
        "name": "a",
        "title": "an input",
        "size_bytes": 2 * MEBIBYTE,
        "answered": "413",
        "gap_seconds": 0.0123,
        "cpu_seconds": 0.01,
        "grown_bytes": 3 * MEBIBYTE,
        "held_seconds": None,
        "beyond": False,
        "died": False,
    }
    return Row(**{**plain, **fields})  # type: ignore[arg-type]


def test_a_row_shows_what_was_measured() -> None:
    assert line(row()) == "| an input | 2.0 | 413 | 12 | 10 | +3 |  |"
    assert line(row(held_seconds=5.0)).endswith("| 5.0 |")
    assert line(row(held_seconds=5.0, beyond=True)).endswith("| > 5.0 |")
    assert "**died**" in line(row(died=True))


def test_every_input_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("max_body_bytes", [1048576, 8388608])
def test_bodies_are_as_large_as_the_limit_and_not_larger(max_body_bytes: int) -> None:
    limits = ServerConfig(max_body_bytes=max_body_bytes)
    for build in (
        bodies.rerank_query,
        bodies.brackets,
        bodies.alias_of_strings,
        bodies.long_text,
        bodies.backslashes,
        bodies.strings,
        bodies.session,
        bodies.floats,
        bodies.digits,
        bodies.embeddings_digits,
        bodies.nulls,
        bodies.parts,
        bodies.trailers,
        bodies.tiny_chunks,
    ):
        size = len(build(limits).partition(b"\r\n\r\n")[2])
        assert 0.9 * max_body_bytes < size <= (2 if build is bodies.trailers else 1.02) * max_body_bytes, build.__name__


def test_one_input_can_be_chosen_and_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(case: Case, limit_seconds: float) -> Row:
        measured.append(case.name)
        return row(name=case.name)

    monkeypatch.setattr(command, "measured", measure)
    kept = tmp_path / "rows.json"
    run = CliRunner().invoke(app, ["bounds", "--only", "brackets", "--json", str(kept)])
    assert run.exit_code == 0
    assert measured == ["brackets"]
    assert "| an input | 2.0 | 413 |" in run.stdout
    assert json.loads(kept.read_text())[0]["name"] == "brackets"


def test_an_input_that_does_not_exist_is_refused() -> None:
    assert CliRunner().invoke(app, ["bounds", "--only", "nonsense"]).exit_code == 2
