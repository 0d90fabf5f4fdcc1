"""`loadtest compare` as users call it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.__main__ import app


def test_the_list_shows_versions_and_ways(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["compare", "--list", "--peers", str(tmp_path)], env={"COLUMNS": "160"})
    assert shown.exit_code == 0
    assert "loadtest compare --install sglang-router" in shown.output
    assert "a checkout of vllm-project/production-stack" in shown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-c", "4,8"], "one load at a time"),
        ([], "give --concurrency"),
        (["-c", "4", "-e", "embeddings"], "no prefix caches"),
        (["envoy", "-c", "4"], "no proxy envoy"),
        (["-c", "4", "--backends", ","], "--backends wants URLs"),
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_installing_what_no_index_has_says_how_and_fails(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "--install", "production-stack", "--peers", str(tmp_path)])
    assert result.exit_code == 1
