"""The ring of recent requests: bounded, in order, with the keys of the access log."""

import orjson

from gateway.core.observe.log import MOST_RECENT, RecentRequests
from tests.unit.page.builders import record


def shown(rows: list[orjson.Fragment]) -> list[dict[str, object]]:
    return list(orjson.loads(orjson.dumps(rows)))


def test_it_keeps_the_last_requests_and_the_last_failed_ones() -> None:
    recent = RecentRequests(lambda: 1000.0)
    for number in range(0, 10_000, 50):
        recent.add([record(f"r{number + at}", "backend_error" if at == 0 else "completed") for at in range(50)])
    assert recent.count == 10_000
    assert [row["request_id"] for row in shown(recent.rows())] == [f"r{number}" for number in range(9_800, 10_000)]
    failed = shown(recent.failed_rows())
    assert len(failed) == MOST_RECENT
    assert (failed[0]["request_id"], failed[-1]["request_id"]) == ("r0", "r9950")


def test_it_gives_what_is_new_as_far_as_it_is_kept() -> None:
    recent = RecentRequests(lambda: 0.0)
    recent.add([record(f"r{number}") for number in range(5)])
    assert [each.request_id for each in recent.since(3)] == ["r3", "r4"]
    assert recent.since(5) == []
    recent.add([record(f"s{number}") for number in range(1000)])
    assert len(recent.since(5)) == MOST_RECENT
    assert recent.since(5)[-1].request_id == "s999"


def test_a_row_has_the_times_and_tokens_of_the_access_log_and_no_prompt() -> None:
    recent = RecentRequests(lambda: 1000.0)
    recent.add([record("r", client="team-a", tenant="search", model="<script>alert(1)</script>")])
    [row] = shown(recent.rows())
    assert (row["time"], row["queue_ms"], row["first_byte_ms"], row["duration_ms"]) == (1011.0, 250.0, 500.0, 1000.0)
    assert (row["prompt_tokens"], row["predicted_hit_tokens"], row["actual_hit_tokens"]) == (100, 90, 80)
    assert (row["model"], row["client"], row["backend"]) == ("<script>alert(1)</script>", "team-a", "a")
    assert (row["tenant"], row["class"]) == ("search", "interactive")
    assert {"prompt", "messages", "text"}.isdisjoint(row)
