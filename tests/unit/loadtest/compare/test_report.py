"""The report says how it was measured, what is missing, and what went wrong, whoever it was."""

from loadtest.compare.report import markdown, picture, reasons_of
from loadtest.compare.run import compared, line
from tests.unit.loadtest.compare.builders import ENVIRONMENT, SETUP, make_comparison, make_figures, make_turn


def test_the_markdown_has_tables_conditions_and_what_is_missing() -> None:
    turns = [make_turn("gateway", number) for number in range(2)]
    turns += [make_turn("smg", number, figures=make_figures(ttft_p50=60.0)) for number in range(2)]
    text = markdown(make_comparison(turns, {"litellm": "not installed: loadtest compare --install litellm"}))
    assert "| proxy | hit rate | TTFT p50 |" in text
    assert "| gateway 1.2 | 50.0% | **50.0 ms** |" in text
    assert "| smg | 1.00 | 0.83 |" in text
    assert "Medians (± 95 % confidence) of 2 repetitions" in text
    assert "test CPU, 2 cores, 8 GiB, Linux 6.1; 2026-01-02; `compare -c 8`" in text
    assert "Not here: litellm (not installed: loadtest compare --install litellm)." in text
    assert "the median is 5.00 ms" in text
    assert "is their maximum" not in text
    few = markdown(make_comparison([make_turn("gateway", figures=make_figures(requests=40))]))
    assert "p99 of 40 requests is their maximum." in few


def test_what_went_wrong_with_a_peer_is_reported_and_does_not_fail_the_comparison() -> None:
    lost = make_turn("smg", passes_salt=False, figures=make_figures(failed={"http_502": 3}, first_error="http_502: no"))
    lost = lost.model_copy(update={"passed": False, "reasons": ["3 of 100 requests failed"]})
    dead = make_turn("nginx").model_copy(
        update={"figures": None, "failure": "it ended by itself with 1", "passed": False}
    )
    text = markdown(make_comparison([make_turn("gateway"), lost, dead]))
    assert "smg does not pass `cache_salt` on" in text
    assert "smg: http_502: no." in text
    assert "nginx, repetition 1: it ended by itself with 1." in text
    assert reasons_of([make_turn("gateway"), lost, dead]) == []


def test_a_machine_that_was_shared_is_reported() -> None:
    busy = make_comparison([make_turn("gateway", figures=make_figures(others_share=0.4)), make_turn("smg")])
    assert "Other processes used up to 40% of the machine (gateway-1)" in markdown(busy)
    quiet = make_comparison([make_turn("gateway", figures=make_figures(others_share=0.05))])
    assert "Other processes" not in markdown(quiet)


def test_ours_failing_or_a_client_that_was_the_limit_fails_it() -> None:
    failed = make_turn("gateway", passed=False, reasons=["2 of 100 requests failed"])
    dead = make_turn("gateway", 1).model_copy(update={"figures": None, "failure": "it ended by itself with 1"})
    bound = make_turn("smg", valid=False, passed=False, reasons=["event loop lag"])
    assert reasons_of([failed, dead, bound]) == [
        "gateway, repetition 2: it ended by itself with 1",
        "gateway, repetition 1: 2 of 100 requests failed",
        "smg, repetition 1: invalid: event loop lag",
    ]
    assert not compared(ENVIRONMENT, SETUP, [], [failed]).passed
    assert compared(ENVIRONMENT, SETUP, [], [make_turn("gateway")]).passed


def test_a_comparison_of_nothing_fails() -> None:
    assert compared(ENVIRONMENT, SETUP, [], []).reasons == ["nothing was measured"]


def test_a_turn_that_failed_is_shown_with_the_end_of_its_log_and_the_time_left() -> None:
    good = make_turn("gateway")
    dead = make_turn("smg").model_copy(update={"figures": None, "failure": "it ended by itself with 3", "log": ["why"]})
    assert line(good, 4, 10.0, [good]) == (
        "  hit rate 50.0%, TTFT p50 50.0 ms, 1,000 tokens/s, 0 failed; 4 turns, 40 s left"
    )
    assert line(dead, 0, 2.0, [good, dead]) == "  it ended by itself with 3\n    why\n  after 2 s; the last turn"


def test_the_picture_names_every_arm_that_streamed() -> None:
    drawn = picture(make_comparison([make_turn("gateway"), make_turn("smg")]))
    assert drawn.startswith("<svg")
    assert "gateway: 50% of prompt tokens found in a cache" in drawn
    assert "smg: 50%" in drawn
    assert picture(make_comparison([make_turn("gateway", figures=make_figures(ttft_ms=[]))])) == ""
