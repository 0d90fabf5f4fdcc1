"""The fleet and the gateway that the tests talk to. `--engine vllm` runs them on real vLLM engines."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from loadtest.servers.server import Server
from tests.integration.fleet import Fleet, real_fleet, simulated_fleet, spare_engine
from tests.integration.gateway_process import Gateway, config_for, forgets_all, running_gateway
from tests.integration.observed import eventually, read

HERE = Path(__file__).parent
REAL_ENGINE_TIMEOUT_SECONDS = 600  # the first test also waits for the engines, others start one again

StartGateway = Callable[..., AbstractContextManager[Gateway]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=("sim", "vllm"), default="sim", help="engines behind the gateway")


def engine_kind(config: pytest.Config) -> str:
    """What --engine says; the option does not exist when the whole test tree is collected."""
    return str(config.getoption("--engine", default="sim"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if engine_kind(config) == "vllm":
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.timeout(REAL_ENGINE_TIMEOUT_SECONDS))
            if simulated := item.get_closest_marker("simulated"):
                item.add_marker(pytest.mark.skip(f"simulated engines only: {simulated.args[0]}"))


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two chat engines and one embeddings engine."""
    start = {"sim": simulated_fleet, "vllm": real_fleet}[engine_kind(request.config)]
    with start(tmp_path_factory.mktemp("engines")) as running:
        yield running


@pytest.fixture(scope="session")
def gateway(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with default settings in front of the fleet."""
    with running_gateway(tmp_path_factory.mktemp("gateway"), config_for(fleet, {}, {})) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that shares the gateway, no bytes of its requests are left there."""
    shared = request.getfixturevalue("gateway") if "gateway" in request.fixturenames else None
    yield
    if shared is not None:
        forgets_all(shared)


@pytest.fixture
def start_gateway(fleet: Fleet, tmp_path: Path) -> StartGateway:
    """Starts another gateway: start_gateway(sections, max_in_flight=2) as a context manager."""

    def start(sections: dict[str, Any] | None = None, **per_backend: Any) -> AbstractContextManager[Gateway]:
        return running_gateway(tmp_path, config_for(fleet, sections or {}, per_backend))

    return start


@pytest.fixture
def spare(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A chat engine that the test may end."""
    with spare_engine(engine_kind(request.config), tmp_path) as running:
        yield running


async def whole_fleet_is_up(gateway: Gateway, fleet: Fleet) -> None:
    """Ready means one backend; tests need them all."""

    async def all_up() -> bool:
        return await read(gateway.admin_url, "gateway_backend_up") == len(fleet.urls)

    await eventually(all_up, "every backend is up")


@pytest.fixture
async def client(gateway: Gateway, fleet: Fleet) -> AsyncIterator[AsyncOpenAI]:
    """The OpenAI SDK pointed at the gateway."""
    await whole_fleet_is_up(gateway, fleet)
    async with gateway.client() as sdk:
        yield sdk
