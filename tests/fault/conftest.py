"""Fault tests run on the event loop that the gateway runs on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest
import uvloop

from tests.postgres import PostgresServer, postgres_server
from tests.s3_server import KEY_ID, SECRET, S3Server, s3_server
from tests.scripted import ScriptedBackend


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
