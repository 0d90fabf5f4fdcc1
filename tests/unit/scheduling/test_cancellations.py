"""A client may leave at any moment: whatever the gate took for it is given back, and no other request is harmed.

Every scenario is run many times over, each time with the client leaving one turn of the loop later.
"""

import asyncio
from collections.abc import Callable

import pytest

from gateway.core.errors import NoBackend, WaitExpired
from gateway.core.scheduling.leases import LeaseBroker
from gateway.core.scheduling.scheduler import Lease
from tests.unit.scheduling.builders import Hall, ask, hall
from tests.unit.scheduling.virtual_time import run, turns

MAX_WAIT_SECONDS = 60.0
MOST_TURNS = 8
NOTHING_RESERVED = "<KvLedger 0 tokens, 0 requests, 0 prefixes>"


class Scene:
    """One backend with one slot, taken; one client waiting for it."""

    def __init__(self) -> None:
        self.here: Hall = hall(1)
        self.loop = asyncio.get_running_loop()
        self.lease_broker = LeaseBroker(self.here.scheduler, self.here.queue, MAX_WAIT_SECONDS, clock=self.loop.time)
        self.held: list[Lease] = []

    async def take_the_slot(self) -> None:
        self.held.append(await self.lease_broker.lease(ask()))

    def give_the_slot_back(self) -> None:
        self.held.pop().__exit__(None, None, None)

    def client(self) -> "asyncio.Task[str]":
        return self.loop.create_task(self._visit())

    async def _visit(self) -> str:
        with await self.lease_broker.lease(ask(keys=(1, 2), edges=(100, 200), prompt_size=210)) as lease:
            await turns(1)
            lease.on_tokens(5000)  # more than was reserved
            await turns(1)
            return lease.backend

    async def left(self, client: "asyncio.Task[str]") -> type[BaseException] | str:
        try:
            return await client
        except (asyncio.CancelledError, WaitExpired, NoBackend) as error:
            return type(error)

    async def check_that_nothing_leaked(self) -> None:
        """Another client gets the slot, and afterwards everything is at zero."""
        await turns(3)
        for lease in self.held:
            lease.__exit__(None, None, None)
        assert await self.client() == "a"
        assert self.lease_broker.waiting == 0
        assert self.here.state == "a 0/1; 0 waiting"
        assert repr(self.here.sites[0].load) == "<EngineLoad 0 in flight, 0 decoding, 0 tokens>"
        assert repr(self.here.sites[0].kv) == NOTHING_RESERVED
        assert repr(self.here.queue) == "<Queue 0 waiting, 0 bytes: empty>"


@pytest.mark.parametrize("after", range(MOST_TURNS))
def test_a_client_that_leaves_while_it_waits_has_taken_nothing(after: int) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.take_the_slot()
        client = scene.client()
        await turns(after)
        client.cancel()
        assert await scene.left(client) is asyncio.CancelledError
        assert len(scene.here.queue) == scene.lease_broker.waiting == 0
        await scene.check_that_nothing_leaked()

    run(main())


@pytest.mark.parametrize("after", range(MOST_TURNS))
def test_a_client_that_leaves_some_turns_after_the_slot_came_free_gives_it_back(after: int) -> None:
    """Turn 0 is before the line is looked through, turn 1 after the grant but before the client runs."""

    async def main() -> None:
        scene = Scene()
        await scene.take_the_slot()
        client = scene.client()
        await turns(3)
        scene.give_the_slot_back()
        await turns(after)
        if client.cancel():
            assert await scene.left(client) is asyncio.CancelledError
        else:
            assert await client == "a"
        await scene.check_that_nothing_leaked()

    run(main())


def test_a_client_that_leaves_after_the_grant_and_before_it_runs_gives_the_slot_to_the_next() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.take_the_slot()
        first, second = scene.client(), scene.client()
        await turns(3)
        scene.give_the_slot_back()
        await turns(1)
        assert scene.here.state == "a 1/1; 1 waiting"
        assert not first.done()
        first.cancel()
        assert await scene.left(first) is asyncio.CancelledError
        assert await second == "a"
        await scene.check_that_nothing_leaked()

    run(main())


@pytest.mark.parametrize("order", ["cancel then grant", "grant then cancel"])
def test_a_cancellation_in_the_same_turn_as_the_grant_gives_the_slot_back(order: str) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.take_the_slot()
        client = scene.client()
        await turns(3)
        steps: list[Callable[[], object]] = [scene.give_the_slot_back, client.cancel]
        for step in steps if order == "grant then cancel" else reversed(steps):
            step()
        assert await scene.left(client) is asyncio.CancelledError
        await scene.check_that_nothing_leaked()

    run(main())


@pytest.mark.parametrize("offset", [-1e-6, 0.0, 1e-6], ids=["just before", "at", "just after"])
def test_a_grant_around_the_deadline_is_either_used_or_given_back(offset: float) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.take_the_slot()
        deadline = scene.loop.time() + MAX_WAIT_SECONDS
        client = scene.client()
        await turns(1)
        scene.loop.call_at(deadline + offset, scene.give_the_slot_back)
        assert await scene.left(client) in ("a", WaitExpired)
        await scene.check_that_nothing_leaked()

    run(main())


def test_a_grant_and_the_deadline_in_one_turn_give_the_slot_back() -> None:
    """The grant is made by a timer that is due together with the deadline, and runs before it."""

    async def main() -> None:
        scene = Scene()
        await scene.take_the_slot()
        began = scene.loop.time()
        client = scene.client()
        await turns(3)

        def grant_now() -> None:
            scene.give_the_slot_back()
            scene.lease_broker._drain()

        scene.loop.call_at(began + MAX_WAIT_SECONDS - 1e-12, grant_now)
        assert await scene.left(client) is WaitExpired
        await scene.check_that_nothing_leaked()

    run(main())


@pytest.mark.parametrize("after", range(MOST_TURNS))
def test_a_client_that_leaves_around_its_deadline_leaves_nothing(after: int) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.take_the_slot()
        client = scene.client()
        await asyncio.sleep(MAX_WAIT_SECONDS - 1e-9)
        await turns(after)
        client.cancel()
        assert await scene.left(client) in (asyncio.CancelledError, WaitExpired)
        await scene.check_that_nothing_leaked()

    run(main())


@pytest.mark.parametrize("after", range(MOST_TURNS))
def test_a_client_that_leaves_while_the_backends_vanish_leaves_nothing(after: int) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.take_the_slot()
        client = scene.client()
        await turns(3)
        scene.here.serving["m"] = []
        scene.lease_broker.fleet_changed()
        await turns(after)
        client.cancel()
        assert await scene.left(client) in (asyncio.CancelledError, NoBackend)
        scene.here.serving["m"] = scene.here.sites
        scene.lease_broker.fleet_changed()
        await scene.check_that_nothing_leaked()

    run(main())


@pytest.mark.parametrize("after", range(MOST_TURNS))
def test_of_many_clients_that_all_leave_at_once_nothing_stays(after: int) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.take_the_slot()
        clients = [scene.client() for _ in range(5)]
        await turns(3)
        scene.give_the_slot_back()
        await turns(after)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await scene.check_that_nothing_leaked()

    run(main())


def test_a_lease_that_is_never_entered_is_visible_as_taken() -> None:
    """The promise is to whoever enters the block; this shows that the checks above can fail."""

    async def main() -> None:
        scene = Scene()
        await scene.lease_broker.lease(ask())
        assert scene.here.state == "a 1/1; 0 waiting"
        assert repr(scene.here.sites[0].kv) != NOTHING_RESERVED

    run(main())
