"""What is not installed is left out with a word on how to have it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.compare.listing import arms_of
from loadtest.compare.peers import PEERS


def test_all_arms_are_listed_and_those_that_are_missing_say_how_to_have_them(tmp_path: Path) -> None:
    arms = {arm.name: arm for arm in arms_of([], PEERS, tmp_path, engines=2)}
    assert list(arms) == list(PEERS)
    assert not arms["gateway"].missing
    assert arms["sglang-router"].missing == "not installed: loadtest compare --install sglang-router"


def test_one_engine_is_an_arm_without_a_proxy_and_several_are_not(tmp_path: Path) -> None:
    assert arms_of([], PEERS, tmp_path, engines=1)[0].name == "direct"
    asked = arms_of(["gateway", "direct"], PEERS, tmp_path, engines=2)
    assert [arm.name for arm in asked] == ["gateway", "direct"]
    assert "added latency" in asked[1].missing


def test_a_name_that_nobody_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no proxy envoy; there are direct, gateway"):
        arms_of(["envoy"], PEERS, tmp_path, engines=2)


def test_the_list_shows_versions_and_ways(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["compare", "--list", "--peers", str(tmp_path)], env={"COLUMNS": "160"})
    assert shown.exit_code == 0
    assert "loadtest compare --install sglang-router" in shown.output
    assert "a checkout of vllm-project/production-stack" in shown.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-c", "4,8"], "one load at a time"),
        ([], "give --concurrency"),
        (["-c", "4", "-e", "embeddings"], "no prefix caches"),
        (["envoy", "-c", "4"], "no proxy envoy"),
        (["-c", "4", "--backends", ","], "--backends wants URLs"),
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert told in " ".join(result.output.replace("│", " ").split())


def test_installing_what_no_index_has_says_how_and_fails(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "--install", "production-stack", "--peers", str(tmp_path)])
    assert result.exit_code == 1
