import asyncio
import socket
from typing import Any

import pytest

from gateway.config import UpstreamConfig
from gateway.core.errors import ConnectFailed
from gateway.core.relay.connection import BackendConnection, Pool
from tests.unit.relay.peers import FakeReceiver, FakeTransport, backend, connected
from tests.unit.scheduling.virtual_time import run

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Scene(Pool):
    """A pool whose connections lead nowhere, under a clock that the test turns."""

    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        super().__init__(backend(), UpstreamConfig.model_validate(config), lambda: self.now)
        self.made: list[tuple[BackendConnection, FakeTransport]] = []

    async def _connect(self) -> BackendConnection:
        self.made.append(connected(self.now))
        return self.made[-1][0]

    def used(self, *, fresh: bool = False) -> BackendConnection:
        """A connection that was taken and got a whole answer."""
        connection = (None if fresh else self.take_idle()) or run(self.take_new())
        connection.send(b"x", FakeReceiver(connection))
        connection.data_received(ANSWER)
        return connection

    def aborted(self) -> list[bool]:
        return [transport.aborted for _, transport in self.made]


def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    pool = Scene()
    connection = pool.used()
    assert repr(pool) == "<Pool a 1 in use, 0 idle>"
    pool.give_back(connection)
    assert repr(pool) == "<Pool a 0 in use, 1 idle>"
    assert pool.used() is connection


def test_the_most_recently_used_comes_first() -> None:
    pool = Scene()
    first, second = pool.used(), pool.used()
    pool.give_back(first)
    pool.give_back(second)
    assert pool.take_idle() is second
    assert pool.take_idle() is first


def test_a_fresh_one_is_made_where_a_used_one_will_not_do() -> None:
    pool = Scene()
    pool.give_back(pool.used())
    assert pool.used(fresh=True) is pool.made[1][0]
    assert repr(pool) == "<Pool a 1 in use, 1 idle>"


def test_a_connection_without_a_whole_answer_is_closed() -> None:
    pool = Scene()
    connection = run(pool.take_new())
    connection.send(b"x", FakeReceiver(connection))
    connection.data_received(ANSWER[:-1])
    pool.give_back(connection)
    assert pool.aborted() == [True]
    assert repr(pool) == "<Pool a 0 in use, 0 idle>"


@pytest.mark.parametrize(("idle_seconds", "kept"), [(2.9, True), (3.0, False)])
def test_a_connection_is_idle_for_less_than_the_backend_would_keep_it(idle_seconds: float, kept: bool) -> None:
    pool = Scene(keep_alive_seconds=3.0)
    connection = pool.used()
    pool.give_back(connection)
    pool.now = idle_seconds
    assert (pool.used() is connection) == kept
    assert pool.aborted()[0] == (not kept)


def test_those_idle_for_too_long_are_closed_when_another_comes_back() -> None:
    pool = Scene(keep_alive_seconds=3.0)
    old, young = pool.used(), pool.used()
    pool.give_back(old)
    pool.now = 3.5
    pool.give_back(young)
    assert pool.aborted() == [True, False]


def test_a_connection_older_than_its_time_is_not_used_again() -> None:
    pool = Scene(max_connection_age_seconds=300.0)
    connection = pool.used()
    pool.now = 300.0
    pool.give_back(connection)
    assert pool.used() is not connection
    assert pool.aborted() == [True, False]


def test_an_idle_connection_that_the_backend_closed_is_passed_over() -> None:
    pool = Scene()
    connection = pool.used()
    pool.give_back(connection)
    connection.connection_lost(None)
    assert pool.used() is not connection


def test_a_connection_that_a_slow_client_had_paused_is_read_again() -> None:
    pool = Scene()
    connection = pool.used()
    connection.pause_reading()
    pool.give_back(connection)
    assert pool.made[0][1].reading


def test_closing_the_pool_closes_what_is_idle() -> None:
    pool = Scene()
    for connection in [pool.used(), pool.used()]:
        pool.give_back(connection)
    pool.close()
    assert pool.aborted() == [True, True]


def test_the_head_of_a_request_names_the_backend_and_its_own_key() -> None:
    pool = Pool(backend("http://10.0.0.1:8000", "secret"), UpstreamConfig(), lambda: 0.0)
    assert pool.constant_head == (
        b" HTTP/1.1\r\nhost: 10.0.0.1:8000\r\naccept-encoding: identity\r\nauthorization: Bearer secret\r\n"
    )
    assert b"authorization" not in Scene().constant_head


async def test_a_backend_whose_port_is_closed_cannot_be_reached() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        pool = Pool(backend(url), UpstreamConfig(), lambda: 0.0)
        with pytest.raises(ConnectFailed, match="connect to backend 'a'") as error:
            await pool.take_new()
    assert isinstance(error.value.__cause__, ConnectionRefusedError)
    assert pool.open == 0


async def test_a_backend_that_does_not_accept_in_time_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*args: object, **kwargs: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", hang)
    pool = Pool(backend(), UpstreamConfig(connect_timeout_seconds=0.01), lambda: 0.0)
    with pytest.raises(ConnectFailed, match=r"within 0\.01 s"):
        await pool.take_new()
    assert pool.open == 0
