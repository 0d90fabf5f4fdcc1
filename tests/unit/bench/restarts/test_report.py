"""What a run of the restart bench shows, and which bars it misses."""

from dataclasses import replace
from pathlib import Path

import msgspec

from tests.bench.restarts.load import Sent
from tests.bench.restarts.report import failures, hit_rate, hit_rates, is_near, problems, table, within
from tests.bench.restarts.run import Measured, Options, Restart

OPTIONS = Options(200, 2, 5, 60, 60, 60, cold=True, seed=1, folder=Path("."))
GOOD = Sent("chat", 10.0, 10.0, 10.5, None, 0.2, 3.0, 100, 70)


def at(seconds: float, cached_tokens: int = 70, **changes: object) -> Sent:
    moved = {"due": seconds, "begun": seconds, "ended": seconds + 0.5, "cached_tokens": cached_tokens}
    return msgspec.structs.replace(GOOD, **moved | changes)


def measured() -> Measured:
    """A run without fault: before at 0 s, restarts at 60 s and 67 s, after at 69 s."""
    return Measured(
        OPTIONS,
        before=0.0,
        after=69.0,
        cold=200.0,
        sent=[at(second) for second in range(130)] + [at(61.0, connect_seconds=0.004, kind="stream")],
        sent_cold=[at(200.0 + second, 40) for second in range(60)],
        restarts=[Restart(60.0, 62.0, 90 << 20), Restart(67.0, 69.0, 92 << 20)],
        peaks=[("chat-0", 16, 16), ("embeddings", 90, 128)],
        most_alive=3,
        last_ended_seconds=0.1,
        last_rss_bytes=93 << 20,
    )


def test_hit_rates_are_those_of_the_prompt_tokens_in_a_window() -> None:
    sent = [at(1.0), at(2.0, 30), at(9.0, 0), at(2.5, 0, prompt_tokens=0)]
    assert len(within(sent, 1.0, 8.0)) == 3
    assert hit_rate(within(sent, 1.0, 8.0)) == 50
    assert hit_rate([]) == 0


def test_a_run_without_fault_misses_no_bar() -> None:
    assert problems(measured()) == []
    assert failures(measured()) == []


def test_each_bar_is_judged() -> None:
    failed = replace(measured(), sent=[*measured().sent, at(63.0, error="closed without an answer")])
    assert problems(failed) == ["1 of 132 requests failed"]
    (line,) = failures(failed)
    assert line.startswith("chat: closed without an answer; begun +1.00 s from the end of restart 1")
    over = replace(measured(), peaks=[("chat-0", 17, 16)])
    assert problems(over) == ["chat-0 had 17 sequences at once; its cap is 16"]
    assert len(problems(replace(measured(), last_ended_seconds=None))) == 1
    assert len(problems(replace(measured(), troubles=["Traceback"]))) == 0
    colder = replace(measured(), sent=[at(second, 70 if second < 60 else 65) for second in range(130)])
    assert hit_rates(colder) == (70, 65)
    assert problems(colder) == ["the hit rate was 70.0 % before the restarts, 65.0 % after"]


def test_short_windows_say_nothing_of_hit_rates() -> None:
    sent = [at(second, 70 if second < 60 else 10) for second in range(130)]
    assert problems(replace(measured(), options=replace(OPTIONS, window_seconds=5), sent=sent)) == []


def test_requests_around_a_restart_are_told_apart() -> None:
    restarts = measured().restarts
    assert [is_near(at(second), restarts) for second in (59.0, 59.6, 61.0, 63.4, 64.0, 70.0)] == [
        *(False, True, True, True, False, True)
    ]


def test_the_table_has_the_figures() -> None:
    shown = table(measured())
    for row in (
        "| requests | 131 in 129 s (1/s) |",
        "| failed | 0 |",
        "| most sequences at once, chat-0 | 16 (cap 16) |",
        "| hit rate, 60 s before the first restart | 70.0 % |",
        "| hit rate, 60 s after a start without state | 40.0 % |",
        "| a restart took | 2.0 s (longest 2.0 s) |",
        "| longest connect, around restarts and apart from them | 4 ms, none ms |",
        "| most processes at the same time | 3 |",
        "| RSS of the first, the last process | 90 MiB, 93 MiB |",
    ):
        assert row in shown
