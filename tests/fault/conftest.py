"""Fault tests run on the event loop that the gateway runs on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest
import uvloop

from tests import live_bytes
from tests.postgres import PostgresServer, postgres_server
from tests.s3_server import KEY_ID, SECRET, S3Server, s3_server
from tests.scripted import ScriptedBackend

_SOON_SECONDS = 2.0  # in which threads let go of what they hold
_FAILED = pytest.StashKey[bool]()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The gateway's loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def backend() -> AsyncIterator[ScriptedBackend]:
    """A backend."""
    async with ScriptedBackend() as one:
        yield one


@pytest.fixture
async def other() -> AsyncIterator[ScriptedBackend]:
    """Another backend of the same model."""
    async with ScriptedBackend() as one:
        yield one


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server of PostgreSQL; each test makes a database of its own."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def running_s3() -> Iterator[S3Server]:
    """A server with the API of S3; each test has a place of its own."""
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(running_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, and its credentials in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return running_s3


@pytest.fixture
def batches(postgres: PostgresServer, s3: S3Server) -> dict[str, Any]:
    """The settings of gateways that share batches."""
    return {"path": s3.new_place(), "database": postgres.new_database(), "s3_endpoint": s3.url, "lines_in_flight": 8}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """No large bytes of a test may be left in memory behind it, though no cycles were collected meanwhile."""
    live_bytes.starting()
    try:
        return (yield)
    finally:
        live_bytes.ended()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note a failure: its traceback holds what the test had."""
    try:
        return (yield)
    except BaseException:
        item.stash[_FAILED] = True
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Look once the test and all its fixtures are gone."""
    result = yield
    if isinstance(item, pytest.Function):
        item.funcargs.clear()
    if _FAILED not in item.stash and (left := live_bytes.leak(_SOON_SECONDS)):
        pytest.fail(left, pytrace=False)
    return result
