"""`gateway usage`: what the admin port has counted, as a table, CSV and JSON."""

import json
from datetime import date, timedelta
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.__main__ import app
from gateway.features.keys.usage import State
from gateway.features.keys.usage_page import usage_document
from tests.unit.pages import serving

TODAY = date(2026, 11, 26)
DAY = (TODAY - date(1970, 1, 1)).days
STATE: State = {
    "day": DAY,
    "rows": [("ann", "m", [2, 1000000, 400, 50, 1]), ("bob", "n", [1, 5, 0, 5, 0])],
    "past": {},
}


def document(**options: Any) -> dict[str, Any]:
    return usage_document(STATE, TODAY - timedelta(25), TODAY, **{"by_day": False, **options})


def usage(*arguments: str) -> tuple[Result, list[str]]:
    """The command, and what it asked for."""
    asked: list[str] = []

    def page(path: str) -> tuple[int, bytes]:
        asked.append(path)
        return 200, json.dumps(document(by_day="by=day" in path)).encode()

    with serving(page) as url:
        return CliRunner().invoke(app, ["usage", "--admin", url, *arguments]), asked


def test_the_table_has_a_row_for_each_key_and_model_and_a_sum() -> None:
    result, asked = usage()
    lines = [line.split() for line in result.stdout.splitlines()]
    assert asked == ["/admin/usage?"]
    assert ["ann", "m", "2", "1", "1,000,000", "400", "50"] in lines
    assert ["total", "3", "1", "1,000,005", "400", "55"] in lines
    assert "from 2026-11-01 to 2026-11-26 (UTC); counted since 2026-11-26" in result.stdout


def test_csv_has_a_header_and_the_days_if_they_are_asked_for() -> None:
    result, asked = usage("--csv", "--by-day", "--since", "2026-11-01", "--until", "2026-11-30")
    assert asked == ["/admin/usage?since=2026-11-01&until=2026-11-30&by=day"]
    assert result.stdout.splitlines() == [
        "day,key,model,requests,prompt_tokens,cached_tokens,completion_tokens,errors",
        "2026-11-26,ann,m,2,1000000,400,50,1",
        "2026-11-26,bob,n,1,5,0,5,0",
    ]
    assert usage("--csv")[0].stdout.startswith("key,model,requests,")
    assert "day" in usage("--by-day")[0].stdout


def test_json_is_what_the_gateway_answers() -> None:
    shown = json.loads(usage("--json")[0].stdout)
    assert shown["rows"] == document()["rows"]
    assert usage("--json", "--csv")[0].exit_code == 2


@pytest.mark.parametrize("options", [["--csv"], []])
@pytest.mark.parametrize("body", [b'{"rows": 5}', b'{"rows": []}', b'{"a": 1}'])
def test_a_document_of_another_version_is_an_error(options: list[str], body: bytes) -> None:
    with serving(lambda _: (200, body)) as url:
        result = CliRunner().invoke(app, ["usage", "--admin", url, *options])
    assert (result.exit_code, "use the version of the gateway" in result.stderr) == (1, True)
