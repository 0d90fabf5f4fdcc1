"""What a request says of its rank, its session and its report."""

from typing import Any

import pytest
from multidict import CIMultiDict

from loadtest.engine.request_parameters import Steering, read_steering


def steering(body: Any = None, **headers: str) -> Steering:
    return read_steering(CIMultiDict(headers), body or {})


@pytest.mark.parametrize(
    ("text", "rank"), [("0", 0), ("3", 3), ("-1", -1), (" 2 ", 2), ("", None), ("first", None), ("1.0", None)]
)
def test_a_rank_is_what_python_reads_as_an_integer(text: str, rank: int | None) -> None:
    assert steering(**{"x-data-parallel-rank": text}) == Steering(rank=rank)


def test_the_bodys_session_comes_before_the_headers_and_that_before_the_extra_arguments() -> None:
    extra = {"vllm_xargs": {"session_id": "extra"}}
    assert steering(extra).session_id == "extra"
    assert steering(extra, **{"X-Session-ID": "header"}).session_id == "header"
    assert steering({**extra, "session_id": "body"}, **{"X-Session-ID": "header"}).session_id == "body"


def test_only_the_full_report_reports_of_hits() -> None:
    assert steering({"vllm_xargs": {"kv_cache_report_mode": "full"}}).reports_hits
    assert not steering({"vllm_xargs": {"kv_cache_report_mode": "incremental"}}).reports_hits
    assert steering({"vllm_xargs": "full"}) == Steering()
