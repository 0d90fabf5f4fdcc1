import asyncio

import pytest

from gateway.core.errors import DeadlineUnmeetable, ModelNotFound, NoBackend, QueueFull, WaitExpired
from gateway.core.request import Demand
from gateway.core.scheduling.leases import LeaseBroker
from gateway.core.scheduling.scheduler import Lease
from tests.unit.scheduling.builders import STARVATION_SECONDS, Hall, ask, hall
from tests.unit.scheduling.virtual_time import run, turns

MAX_WAIT_SECONDS = 60.0


def gate_of(here: Hall, keep_alive_seconds: float = 0.0) -> LeaseBroker:
    loop = asyncio.get_running_loop()
    return LeaseBroker(
        here.scheduler, here.queue, MAX_WAIT_SECONDS, clock=loop.time, keep_alive_seconds=keep_alive_seconds
    )


async def hold(
    lease_broker: LeaseBroker, order: list[str], name: str, release: asyncio.Event, wish: Demand | None = None
) -> None:
    with await lease_broker.lease(wish or ask()) as lease:
        order.append(f"{name} on {lease.backend}")
        lease.on_first_token()
        await release.wait()


def test_a_lease_holds_its_slot_until_the_end_of_the_block() -> None:
    async def main() -> None:
        here = hall(2)
        with await gate_of(here).lease(ask()) as lease:
            assert (lease.backend, lease.engine_index, lease.hit_tokens, lease.waited_seconds) == ("a", 0, 0, 0.0)
            assert here.state == "a 1/2; 0 waiting"
        assert here.state == "a 0/2; 0 waiting"

    run(main())


def test_a_block_that_raises_gives_its_slot_back() -> None:
    async def main() -> None:
        here = hall(2)
        with pytest.raises(ZeroDivisionError), await gate_of(here).lease(ask()):
            raise ZeroDivisionError
        assert here.state == "a 0/2; 0 waiting"

    run(main())


def test_an_answer_that_becomes_longer_than_expected_closes_its_backend_earlier_and_gives_all_of_it_back() -> None:
    async def main() -> None:
        here = hall(8, kv=2000)
        lease_broker, release, order = gate_of(here), asyncio.Event(), list[str]()
        with await lease_broker.lease(ask(prompt_tokens=600, output_tokens=1500)) as long:
            assert (long.on_tokens(0), here.sites[0].kv.taken_tokens) == (8, 608 + 512)
            assert 0 < long.on_tokens(700) < 100
            assert here.sites[0].kv.taken_tokens > 608 + 700
            waiting = asyncio.create_task(
                hold(lease_broker, order, "next", release, ask(prompt_tokens=600, output_tokens=16))
            )
            await turns(5)
            assert order == []
        release.set()
        await waiting
        assert order == ["next on a"]
        assert here.sites[0].kv.taken_tokens == 0

    run(main())


def test_waiting_requests_are_served_in_order_as_slots_come_free() -> None:
    async def main() -> None:
        here = hall(1)
        lease_broker = gate_of(here)
        order: list[str] = []
        releases = [asyncio.Event() for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            for number, release in enumerate(releases):
                group.create_task(hold(lease_broker, order, f"{number}", release))
                await turns(3)
            assert lease_broker.waiting == 2
            assert here.state == "a 1/1; 2 waiting"
            for number, release in enumerate(releases):
                assert order == [f"{earlier} on a" for earlier in range(number + 1)]
                release.set()
                await turns(4)
        assert here.state == "a 0/1; 0 waiting"

    run(main())


def test_a_first_token_opens_the_backend_for_the_next() -> None:
    async def main() -> None:
        here = hall(4, policy="prefix")
        lease_broker, release = gate_of(here), asyncio.Event()
        order: list[str] = []
        with await lease_broker.lease(ask(prompt_tokens=100_000)) as long:
            waiting = asyncio.create_task(hold(lease_broker, order, "next", release))
            await turns(5)
            assert order == []
            long.on_first_token()
            await turns(3)
            assert order == ["next on a"]
            release.set()
            await waiting

    run(main())


def test_time_alone_opens_a_backend_whose_prefill_is_not_seen_to_end() -> None:
    async def main() -> None:
        here = hall(4, policy="prefix")
        lease_broker, loop = gate_of(here), asyncio.get_running_loop()
        with await lease_broker.lease(ask(prompt_tokens=20_000, streams=False)):
            began = loop.time()
            with await lease_broker.lease(ask()) as lease:
                assert lease.waited_seconds == pytest.approx(loop.time() - began)
                assert lease.waited_seconds > 0.4

    run(main())


def test_a_starving_request_takes_another_backend_after_its_time() -> None:
    async def main() -> None:
        here = hall(1, 1, policy="prefix")
        lease_broker, loop = gate_of(here), asyncio.get_running_loop()
        keys, edges = tuple(range(1, 160)), tuple(range(2500, 397_501, 2500))
        here.index.record(1, keys, edges)
        wish = ask(keys=keys, edges=edges, prompt_size=400_000, prompt_tokens=100_000, output_tokens=1)
        with await lease_broker.lease(wish) as first:
            assert first.backend == "b"
            first.on_first_token()
            began = loop.time()
            with await lease_broker.lease(wish) as second:
                assert second.backend == "a"
                assert STARVATION_SECONDS <= loop.time() - began < STARVATION_SECONDS + 0.1

    run(main())


def test_after_the_longest_wait_the_error_has_a_retry_time() -> None:
    async def main() -> None:
        here = hall(1)
        lease_broker, loop = gate_of(here), asyncio.get_running_loop()
        with await lease_broker.lease(ask()):
            began = loop.time()
            with pytest.raises(WaitExpired, match="had free capacity within 60 s") as expired:
                await lease_broker.lease(ask())
            assert loop.time() - began == pytest.approx(MAX_WAIT_SECONDS)
            assert expired.value.retry_after_seconds is not None
            assert 0.1 <= expired.value.retry_after_seconds <= 60
            assert lease_broker.waiting == len(here.queue) == 0

    run(main())


def test_when_every_backend_goes_waiting_requests_fail_at_once_without_holding() -> None:
    async def main() -> None:
        here = hall(1, holds=False)
        lease_broker = gate_of(here)
        with await lease_broker.lease(ask()):
            waiting = [asyncio.create_task(lease_broker.lease(ask())) for _ in range(3)]
            await turns(3)
            here.serving["m"] = []
            lease_broker.fleet_changed()
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [NoBackend] * 3
        assert all(isinstance(result, NoBackend) and result.retry_after_seconds == 2.0 for result in results)
        assert here.state == "a 0/1; 0 waiting"

    run(main())


def test_a_backend_that_comes_back_serves_waiting_requests() -> None:
    async def main() -> None:
        here = hall(1, 1)
        here.serving["m"] = here.sites[:1]
        lease_broker = gate_of(here)
        with await lease_broker.lease(ask()):
            waiting = asyncio.create_task(lease_broker.lease(ask()))
            await turns(3)
            here.serving["m"] = here.sites
            lease_broker.fleet_changed()
            with await waiting as lease:
                assert lease.backend == "b"

    run(main())


def test_while_no_backend_can_serve_requests_wait_for_one_to_come_back() -> None:
    async def main() -> None:
        here = hall(1)
        lease_broker, loop = gate_of(here), asyncio.get_running_loop()
        here.serving["m"] = []
        lease_broker.fleet_changed()
        began = loop.time()
        held = [asyncio.create_task(lease_broker.lease(wish)) for wish in (ask(), ask(sequences=0), ask(pinned="a"))]
        await asyncio.sleep(40.0)
        assert lease_broker.waiting == 3
        here.serving["m"] = here.sites
        lease_broker.fleet_changed()
        for waiting in held:
            with await waiting as lease:
                assert lease.backend == "a"
                assert lease.waited_seconds == pytest.approx(40.0)
        assert loop.time() - began == pytest.approx(40.0)
        assert here.state == "a 0/1; 0 waiting"

    run(main())


def test_a_wait_that_ends_without_a_backend_says_so_and_not_that_all_are_busy() -> None:
    async def main() -> None:
        here = hall(1)
        lease_broker, loop = gate_of(here), asyncio.get_running_loop()
        with await lease_broker.lease(ask()):
            waiting = asyncio.create_task(lease_broker.lease(ask()))
            await asyncio.sleep(10.0)
            here.serving["m"] = []
            lease_broker.fleet_changed()
            with pytest.raises(NoBackend, match="'m' was ready within 60 s"):
                await lease_broker.lease(ask(), already_waited_seconds=20.0)
            assert loop.time() == pytest.approx(1050.0)
            with pytest.raises(NoBackend):
                await waiting
            assert loop.time() == pytest.approx(1060.0)
        assert lease_broker.waiting == len(here.queue) == 0

    run(main())


def test_a_request_held_for_a_model_that_turns_out_to_be_unknown_fails_at_once() -> None:
    async def main() -> None:
        here = hall(1)
        lease_broker = gate_of(here)
        here.serving["o"] = []
        waiting = asyncio.create_task(lease_broker.lease(ask(model="o")))
        await turns(3)
        del here.serving["o"]
        lease_broker.fleet_changed()
        with pytest.raises(ModelNotFound):
            await waiting
        assert lease_broker.waiting == len(here.queue) == 0

    run(main())


def test_a_change_of_the_fleet_or_a_timeout_ends_the_wait_for_one() -> None:
    async def main() -> None:
        lease_broker, loop = gate_of(hall(1)), asyncio.get_running_loop()
        waiting = [asyncio.create_task(lease_broker.change(5.0)) for _ in range(2)]
        await asyncio.sleep(1.0)
        lease_broker.fleet_changed()
        await asyncio.gather(*waiting)
        assert loop.time() == pytest.approx(1001.0)
        await lease_broker.change(5.0)
        assert loop.time() == pytest.approx(1006.0)

    run(main())


def test_refusals_come_at_once_and_leave_nothing() -> None:
    async def main() -> None:
        here = hall(1, max_requests=0)
        lease_broker = gate_of(here)
        with pytest.raises(ModelNotFound):
            await lease_broker.lease(Demand("other"))
        with await lease_broker.lease(ask()), pytest.raises(QueueFull):
            await lease_broker.lease(ask())
        assert lease_broker.waiting == len(here.queue) == 0

    run(main())


def test_all_changes_of_one_turn_lead_to_one_scan() -> None:
    async def main() -> None:
        here = hall(3)
        lease_broker = gate_of(here)
        running: list[Lease] = [await lease_broker.lease(ask()) for _ in range(3)]
        waiting = [asyncio.create_task(lease_broker.lease(ask())) for _ in range(3)]
        await turns(3)
        passes = 0
        drain = here.scheduler.scan_queue

        def counted(model: str, now: float) -> object:
            nonlocal passes
            passes += 1
            return drain(model, now)

        here.scheduler.scan_queue = counted  # type: ignore[method-assign,assignment]
        for lease in running:
            lease.__exit__(None, None, None)
        granted = await asyncio.gather(*waiting)
        assert [lease.backend for lease in granted] == ["a"] * 3
        assert passes == 1

    run(main())


def test_an_idle_gate_sets_no_timers() -> None:
    async def main() -> None:
        here = hall(1)
        lease_broker, release = gate_of(here), asyncio.Event()
        order: list[str] = []
        with await lease_broker.lease(ask()):
            waiting = asyncio.create_task(hold(lease_broker, order, "next", release))
            await asyncio.sleep(1.0)
        release.set()
        await waiting
        await asyncio.sleep(1.0)
        lease_broker.scan_soon()
        with pytest.raises(RuntimeError, match="never comes"):
            await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="never comes"):
        run(main())


def test_a_request_that_cannot_be_served_in_time_fails_as_soon_as_that_is_known() -> None:
    async def main() -> None:
        here = hall(1, policy="prefix")
        lease_broker, loop = gate_of(here), asyncio.get_running_loop()
        began = loop.time()
        with await lease_broker.lease(ask()) as first:
            first.on_first_token()
            wish = ask(prompt_tokens=20_000, deadline_seconds=began + 5.0)
            with pytest.raises(DeadlineUnmeetable, match="in time") as late:
                await lease_broker.lease(wish)
            least = 5.0 - here.scheduler.explain(wish, loop.time())[0].parts.prefill  # type: ignore[union-attr]
            assert loop.time() - began == pytest.approx(least, abs=0.001)
            assert late.value.retry_after_seconds is not None
        assert lease_broker.waiting == len(here.queue) == 0

    run(main())


@pytest.mark.parametrize("deadline_seconds", [MAX_WAIT_SECONDS + 10, None])
def test_a_deadline_after_the_longest_wait_changes_nothing(deadline_seconds: float | None) -> None:
    async def main() -> None:
        lease_broker, loop = gate_of(hall(1)), asyncio.get_running_loop()
        until = None if deadline_seconds is None else loop.time() + deadline_seconds
        with await lease_broker.lease(ask()), pytest.raises(WaitExpired):
            await lease_broker.lease(ask(deadline_seconds=until))

    run(main())


def test_one_whose_deadline_has_passed_is_served_if_a_backend_is_open_and_else_refused_at_once() -> None:
    async def main() -> None:
        lease_broker, loop = gate_of(hall(1)), asyncio.get_running_loop()
        gone = ask(deadline_seconds=loop.time() - 1.0)
        with await lease_broker.lease(gone):
            began = loop.time()
            with pytest.raises(DeadlineUnmeetable):
                await lease_broker.lease(gone)
            assert loop.time() == began

    run(main())


async def keep_alives_of_a_wait(seconds: float, held_seconds: float, *, listens: bool = True) -> list[float]:
    """When a request gets keep-alives that waits for another to end after `held_seconds`, and long after that."""
    loop, seen = asyncio.get_running_loop(), list[float]()
    lease_broker, began = gate_of(hall(1), seconds), loop.time()

    async def wait() -> None:
        with await lease_broker.lease(
            ask(), send_keep_alive=(lambda: seen.append(loop.time() - began)) if listens else None
        ):
            await asyncio.sleep(100.0)

    with await lease_broker.lease(ask()):
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(held_seconds)
    await asyncio.wait([waiting])
    return seen


def test_a_waiting_request_gets_keep_alives_until_it_has_its_lease() -> None:
    assert run(keep_alives_of_a_wait(15.0, 50.0)) == pytest.approx([15.0, 30.0, 45.0])


@pytest.mark.parametrize(("seconds", "listens"), [(0.0, True), (15.0, False)])
def test_without_an_interval_or_a_receiver_there_are_no_keep_alives(seconds: float, listens: bool) -> None:
    assert run(keep_alives_of_a_wait(seconds, 50.0, listens=listens)) == []


def test_a_wait_that_has_reached_its_limit_gets_no_more_keep_alives() -> None:
    assert run(keep_alives_of_a_wait(25.0, 200.0)) == pytest.approx([25.0, 50.0])


def test_those_who_share_engines_hear_of_each_wait_and_of_each_release_that_nobody_waits_for_here() -> None:
    async def main() -> None:
        heard: list[str] = []
        lease_broker, release, order = gate_of(hall(1)), asyncio.Event(), list[str]()
        lease_broker.when_used(lambda: heard.append("waits"), lambda engine: heard.append(f"released {engine}"))
        first = asyncio.create_task(hold(lease_broker, order, "first", release))
        await turns(5)
        assert heard == []
        second = asyncio.create_task(hold(lease_broker, order, "second", release))
        await turns(5)
        assert heard == ["waits"]
        release.set()
        await asyncio.gather(first, second)
        assert heard == ["waits", "released 0"]

    run(main())
