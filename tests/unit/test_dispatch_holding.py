"""Requests whose backends are away: they are tried again when one is back."""

import asyncio

import pytest

from gateway.core.backends.health import ProbeResult
from gateway.core.errors import (
    BackendAborted,
    BackendError,
    ConnectFailed,
    FreshConnectionClosed,
    NoBackend,
)
from tests.unit.dispatching import WELL, Scene
from tests.unit.scheduling.virtual_time import run, turns


def test_backends_that_cannot_be_reached_are_tried_every_second_until_one_can_be() -> None:
    async def main() -> None:
        scene = Scene(*(ConnectFailed(name) for name in "ababab"), WELL, backends="ab")
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await scene.dispatch() is WELL
        assert sorted(scene.sent[:2]) == ["a", "b"]
        assert len(scene.sent) == 7
        assert loop.time() - began == pytest.approx(5.0)
        scene.check_that_nothing_is_left()

    run(main())


def test_trying_a_backend_that_cannot_be_reached_ends_after_the_longest_wait() -> None:
    async def main() -> None:
        scene = Scene(*[ConnectFailed("why")] * 100, backends="a", eject_failures=1000)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await scene.fails(ConnectFailed)
        assert loop.time() - began == pytest.approx(60.0)

    run(main())


@pytest.mark.parametrize("failure", [ConnectFailed("why"), FreshConnectionClosed("why"), BackendAborted("why")])
def test_a_request_whose_only_backend_restarts_waits_for_it(failure: BackendError) -> None:
    async def main() -> None:
        failure.__cause__ = ConnectionRefusedError()
        scene = Scene(failure, WELL, backends="a")
        [backend] = scene.fleet.backends
        task = asyncio.create_task(scene.dispatch())
        await turns(5)
        scene.fleet.probed(backend, ProbeResult.REFUSED)
        await asyncio.sleep(30.0)
        assert scene.sent == ["a"]
        assert scene.lease_broker.waiting == 1
        scene.fleet.probed(backend, ProbeResult.OK)
        assert await task is WELL
        scene.check_that_nothing_is_left()

    run(main())


def test_a_request_that_kills_the_only_backend_is_not_sent_a_third_time() -> None:
    async def main() -> None:
        scene = Scene(FreshConnectionClosed("why"), FreshConnectionClosed("why"), backends="a")
        await scene.fails(FreshConnectionClosed)
        assert scene.sent == ["a", "a"]

    run(main())


def test_when_no_backend_is_left_the_request_is_refused() -> None:
    async def main() -> None:
        scene = Scene()
        for backend in scene.fleet.backends:
            scene.fleet.probed(backend, ProbeResult.REFUSED)
            scene.fleet.probed(backend, ProbeResult.REFUSED)
            scene.fleet.probed(backend, ProbeResult.REFUSED)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await scene.fails(NoBackend)
        assert loop.time() - began == pytest.approx(60.0)
        assert scene.sent == []
        assert scene.record.backend == ""

    run(main())
