"""The story of a request with a scripted relay: tries, retries, and the place that is always given back."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.errors import (
    AnswerBrokeOff,
    BackendBusy,
    BackendError,
    BackendFault,
    ConnectFailed,
    FreshConnectionClosed,
    ModelMissing,
    ReusedConnectionClosed,
    StreamInterrupted,
    WaitExpired,
)
from gateway.core.observe.record import Record
from gateway.core.request import SEVERAL_TENANTS
from tests.unit.dispatching import WELL, Scene, Step, request
from tests.unit.scheduling.virtual_time import run, turns


def test_a_request_that_goes_well_is_written_down() -> None:
    async def main() -> None:
        scene = Scene(WELL)
        assert await scene.dispatch() is WELL
        record = scene.record
        assert (record.backend, record.attempts, record.first_byte_seconds) == ("a", 1, 1003.5)
        assert (record.prompt_tokens, record.completion_tokens, record.actual_hit_tokens) == (100, 7, 48)
        assert scene.reply.backend_headers == (
            b"x-gateway-backend: a\r\nx-gateway-queue-ms: 0\r\nx-gateway-prefix-tokens: 0\r\n"
        )
        assert scene.attempts() == {("a", "ok"): 1}
        assert scene.record.usage is not None
        assert scene.record.usage.completion_tokens == 7
        scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize(
    ("failure", "sent"),
    [
        (ConnectFailed("why"), ["a", "b"]),
        (ReusedConnectionClosed("why"), ["a", "b!"]),
        (FreshConnectionClosed("why"), ["a", "b"]),
        (BackendBusy("why"), ["a", "b"]),
        (ModelMissing("why"), ["a", "b"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_that_the_client_has_not_seen_is_tried_again(failure: BackendError, sent: list[str]) -> None:
    async def main() -> None:
        scene = Scene(failure, WELL)
        assert await scene.dispatch() is WELL
        assert scene.sent == sent
        assert (scene.record.attempts, scene.record.backend) == (2, "b")
        assert scene.attempts()[("a", failure.result)] == 1
        scene.check_that_nothing_is_left()

    run(main())


def test_attempts_are_counted_by_the_kind_of_failure_to_connect() -> None:
    async def main() -> None:
        scene = Scene(ConnectFailed("why", kind="dns"), WELL)
        await scene.dispatch()
        assert scene.attempts() == {("a", "connect_dns"): 1, ("b", "ok"): 1}

    run(main())


@pytest.mark.parametrize("failure", [BackendFault("why"), AnswerBrokeOff("why"), StreamInterrupted("why")])
def test_other_failures_are_not(failure: BackendError) -> None:
    async def main() -> None:
        scene = Scene(failure)
        await scene.fails(type(failure))
        assert scene.sent == ["a"]

    run(main())


@pytest.mark.parametrize("failure", [ConnectFailed("why"), BackendBusy("why"), ReusedConnectionClosed("why")])
def test_nothing_is_tried_again_once_the_client_has_seen_part_of_an_answer(failure: BackendError) -> None:
    async def main() -> None:
        scene = Scene("begin", failure)
        await scene.fails(type(failure))
        assert scene.sent == ["a"]

    run(main())


def test_each_backend_is_tried_once_when_none_is_reachable_and_requests_do_not_wait() -> None:
    async def main() -> None:
        scene = Scene(*(ConnectFailed(name) for name in "abc"), holds=False)
        await scene.fails(ConnectFailed)
        assert scene.sent == ["a", "b", "c"]
        assert scene.record.attempts == 3

    run(main())


def test_an_alone_backend_is_not_asked_again_what_it_refused() -> None:
    async def main() -> None:
        scene = Scene(BackendBusy("why"), backends="a")
        await scene.fails(BackendBusy)
        assert scene.sent == ["a"]

    run(main())


def test_an_alone_backend_is_asked_again_over_a_fresh_connection_when_a_pooled_one_was_closed() -> None:
    async def main() -> None:
        scene = Scene(ReusedConnectionClosed("why"), WELL, backends="a")
        assert await scene.dispatch() is WELL
        assert scene.sent == ["a", "a!"]

    run(main())


def test_a_pinned_request_is_never_tried_elsewhere() -> None:
    async def main() -> None:
        scene = Scene(BackendBusy("why"))
        await scene.fails(BackendBusy, request(pinned="b", sequences=0))
        assert scene.sent == ["b"]

    run(main())


def test_a_request_that_must_not_be_repeated_is_not() -> None:
    async def main() -> None:
        scene = Scene(BackendBusy("why"))
        what = request()
        what.repeatable = False
        await scene.fails(BackendBusy, what)
        assert scene.sent == ["a"]

    run(main())


def test_without_a_budget_nothing_is_tried_again() -> None:
    async def main() -> None:
        scene = Scene(BackendBusy("why"), retry_budget_min=0, retry_budget_fraction=0.0)
        await scene.fails(BackendBusy)

    run(main())


def test_failures_are_counted_against_the_backend_and_successes_for_it() -> None:
    async def main() -> None:
        scene = Scene(*[AnswerBrokeOff("why")] * 5, backends="a")
        for _ in range(5):
            await scene.fails(AnswerBrokeOff)
        assert scene.backend("a").health.state == "ejected"
        assert scene.doubts == ["a"]

    run(main())


@pytest.mark.parametrize(("tenants", "state"), [("abbbb", "ejected"), ("aaaaa", "up"), ([SEVERAL_TENANTS] * 5, "up")])
def test_error_answers_count_by_whose_requests_they_are(tenants: Sequence[str], state: str) -> None:
    async def main() -> None:
        scene = Scene(*[BackendFault("why")] * 5, backends="a")
        for tenant in tenants:
            await scene.fails(BackendFault, request(tenant=tenant))
        assert scene.backend("a").health.state == state

    run(main())


def test_a_busy_backend_is_not_held_to_have_failed() -> None:
    async def main() -> None:
        scene = Scene(*[BackendBusy("why")] * 6, backends="a")
        for _ in range(6):
            await scene.fails(BackendBusy)
        assert scene.backend("a").health.state == "up"

    run(main())


def test_a_model_that_is_missing_makes_the_backends_list_be_read_again() -> None:
    async def main() -> None:
        scene = Scene(ModelMissing("why"), WELL)
        await scene.dispatch()
        assert scene.doubts == ["a"]

    run(main())


def test_time_in_the_line_adds_up_over_tries() -> None:
    async def main() -> None:
        scene = Scene("hang", WELL, BackendBusy("why"), backends="a")
        first = asyncio.create_task(scene.dispatch())
        await turns(4)
        second = Record("id-2", "chat", 1000.0)
        waiting = asyncio.create_task(scene.dispatcher.dispatch(request(), scene.reply, second))
        await asyncio.sleep(3.0)
        scene.release.set()
        await first
        with pytest.raises(BackendBusy):
            await waiting
        assert second.queue_seconds == pytest.approx(3.0)
        assert b"x-gateway-queue-ms: 3000\r\n" in scene.reply.backend_headers
        scene.check_that_nothing_is_left()

    run(main())


def test_a_wait_that_is_too_long_ends_without_a_try() -> None:
    async def main() -> None:
        scene = Scene("hang", WELL, backends="a")
        first = asyncio.create_task(scene.dispatch())
        await turns(4)
        record = Record("id-2", "chat", 1000.0)
        with pytest.raises(WaitExpired):
            await scene.dispatcher.dispatch(request(), scene.reply, record)
        assert record.attempts == 0
        scene.release.set()
        await first
        scene.check_that_nothing_is_left()

    run(main())


def test_the_engine_on_which_a_request_was_placed_is_passed_on_and_written_down() -> None:
    async def main() -> None:
        scene = Scene(WELL, WELL, WELL, WELL)
        scene.fleet.learned(scene.backend("b"), Facts(models=(ModelCard("m"),), engines=2))
        engines = []
        for _ in range(4):
            await scene.dispatch()
            engines.append(scene.record.engine_index)
        assert sorted(zip(scene.sent, map(str, scene.ranks), engines, strict=True)) == [
            ("a", "None", 0), ("b", "0", 3), ("b", "1", 4), ("c", "None", 2),
        ]  # fmt: skip
        scene.check_that_nothing_is_left()

    run(main())


def test_a_retry_avoids_every_engine_of_the_backend_that_failed() -> None:
    async def main() -> None:
        scene = Scene(BackendBusy("why"), WELL, backends="ab")
        scene.fleet.learned(scene.backend("a"), Facts(models=(ModelCard("m"),), engines=3))
        await scene.dispatch(request(rank=1))
        assert list(zip(scene.sent, scene.ranks, strict=True)) == [("a", 1), ("b", None)]
        scene.check_that_nothing_is_left()

    run(main())


def test_an_explanation_lists_every_backend_best_first() -> None:
    async def main() -> None:
        scene = Scene(WELL, WELL)
        what = request()
        what.explains = True
        await scene.dispatch(what)
        assert (
            b"\r\nx-gateway-explain: a;cost=0;hit=0;open=1, b;cost=1;hit=0;open=1, c;cost=2;"
            in scene.reply.backend_headers
        )
        await scene.dispatch(request())
        assert b"explain" not in scene.reply.backend_headers

    run(main())


@pytest.mark.parametrize("look_up", [True, False])
def test_there_is_no_explanation_where_nothing_was_chosen(look_up: bool) -> None:
    async def main() -> None:
        scene = Scene(WELL)
        what = request(sequences=0) if look_up else request()
        what.explains = True
        scene.dispatcher._response_headers = look_up
        await scene.dispatch(what)
        assert b"explain" not in scene.reply.backend_headers

    run(main())


SCRIPTS: list[tuple[Step, ...]] = [
    (WELL,),
    ("begin", "hang", WELL),
    (ConnectFailed("why"), BackendBusy("why"), WELL),
    (ReusedConnectionClosed("why"), "hang", WELL),
    (ConnectFailed("why"), ConnectFailed("why"), ConnectFailed("why")),
    (BackendFault("why"),),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
@pytest.mark.parametrize("after", range(14))
def test_a_client_that_leaves_at_any_moment_leaves_nothing_taken(script: tuple[Step, ...], after: int) -> None:
    async def main() -> None:
        scene = Scene(*script)
        task = asyncio.create_task(scene.dispatch())
        await turns(after)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("after", range(10))
def test_a_client_that_leaves_the_line_or_its_backend_lets_the_next_one_in(after: int) -> None:
    async def main() -> None:
        scene = Scene("hang", WELL, WELL, WELL, backends="a")
        first = asyncio.create_task(scene.dispatch())
        await turns(4)
        tasks = [
            asyncio.create_task(scene.dispatcher.dispatch(request(), scene.reply, Record("id", "chat", 0.0)))
            for _ in range(2)
        ]
        await turns(2)
        scene.release.set()
        await turns(after)
        tasks[0].cancel()
        assert await first is WELL
        await asyncio.gather(tasks[0], return_exceptions=True)
        assert await tasks[1] is WELL
        scene.check_that_nothing_is_left()

    run(main())


def test_without_response_headers_nothing_of_the_fleet_is_shown() -> None:
    async def main() -> None:
        scene = Scene(WELL)
        scene.dispatcher._response_headers = False
        await scene.dispatch()
        assert scene.reply.backend_headers == b""

    run(main())


def test_a_rank_that_the_client_asks_for_is_left_to_the_backend_to_refuse() -> None:
    async def main() -> None:
        scene = Scene(WELL, WELL, backends="ab")
        for backend, engines in (("a", 1), ("b", 2)):
            scene.fleet.learned(scene.backend(backend), Facts(models=(ModelCard("m"),), engines=engines))
        for _ in range(2):
            await scene.dispatch(request(rank=7))
        assert list(zip(scene.sent, scene.ranks, strict=True)) == [("a", None), ("b", 7)]
        scene.check_that_nothing_is_left()

    run(main())
