from typing import Any

import orjson

from loadtest.recording import Logged, read_log

LINE: dict[str, Any] = {
    "time": 1_700_000_010.0,
    "duration_ms": 4000.0,
    "model": "m",
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "prefix": {"bytes": 400, "ends": [256, 400], "hashes": ["aa", "bb"]},
}


def lines(*changes: dict[str, Any]) -> list[bytes]:
    return [orjson.dumps(LINE | change) + b"\n" for change in changes]


def test_a_request_has_the_time_of_its_arrival() -> None:
    [found] = read_log(lines({})).requests
    assert found == Logged(
        1_700_000_006.0,
        model="m",
        prompt_tokens=100,
        output_tokens=7,
        size_bytes=400,
        ends=(256, 400),
        hashes=("aa", "bb"),
        duration_seconds=4.0,
    )


def test_times_are_read_in_iso_8601_and_in_seconds() -> None:
    both = read_log(lines({}, {"time": "2023-11-14T22:13:30.000Z"}, {"time": "yesterday"}))
    assert [request.at_seconds for request in both.requests] == [1_700_000_006.0] * 2
    assert both.left_out == {"not of the access log": 1}


def test_times_and_cached_tokens_are_read_where_a_line_has_them() -> None:
    reported = {"stream": True, "first_byte_ms": 250.0, "queue_ms": 50.0, "backend": "one", "actual_hit_tokens": 64}
    [streamed] = read_log(lines(reported)).requests
    assert (streamed.first_seconds, streamed.queue_seconds) == (0.25, 0.05)
    assert (streamed.backend, streamed.cached_tokens) == ("one", 64)
    [whole] = read_log(lines(reported | {"stream": False})).requests
    assert whole.first_seconds is None


def test_requests_are_in_the_order_of_their_arrival() -> None:
    found = read_log(lines({"completion_tokens": 1}, {"completion_tokens": 2, "duration_ms": 9000.0})).requests
    assert [request.output_tokens for request in found] == [2, 1]


def test_what_is_left_out_is_counted_by_reason() -> None:
    log = read_log(
        [
            b"Traceback\n",
            b"[]\n",
            b'{"event": "started"}\n',
            *lines(
                {"completion_tokens": 0},
                {"prefix": None},
                {"model": "other"},
                {"prefix": {"bytes": 1, "ends": [1]}},
                {"prefix": {"bytes": 9, "ends": [9, 1], "hashes": ["a", "b"]}},
                {"prefix": {"bytes": 9, "ends": [1], "hashes": ["a", "b"]}},
            ),
        ],
        "m",
    )
    assert log.requests == []
    assert log.left_out == {
        "not of the access log": 6,
        "without an answer, or without its usage": 1,
        "without prefix hashes": 1,
        "of another model": 1,
    }
