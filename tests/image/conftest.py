"""The image under test, which `make image` builds first, and a gateway that runs in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from loadtest.servers.processes import free_ports
from loadtest.servers.server import ServerFailed, serves, simulated_engine, wait_until
from tests.image.build import IMAGE
from tests.image.container import WAIT_SECONDS, Container, Image, Runtime, unpacked

MODEL = "sim"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--built-image", action="store_true", help="check the image that tests.image.build has built")


@dataclass(frozen=True)
class Served:
    """A gateway that serves from a container."""

    container: Container
    url: str
    admin_url: str


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """The built image; tests that need it are skipped unless --built-image says that it is there."""
    if not request.config.getoption("--built-image", default=False):
        pytest.skip("needs the built image: make image")
    with unpacked(IMAGE) as found:
        yield found


@pytest.fixture(scope="session")
def containers(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """Starts containers of the image."""
    return Runtime(image, tmp_path_factory.mktemp("containers"))


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A simulated vLLM outside of the container."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with simulated_engine(["--model", MODEL], log) as engine:
        yield engine.url


def write_config(folder: Path, backend_url: str) -> tuple[int, int]:
    """Write gateway.yaml for a user who is not us; gives the ports it names."""
    port, admin_port = free_ports(2)
    server = {"host": "127.0.0.1", "port": port, "admin": {"host": "127.0.0.1", "port": admin_port}}
    document = {"server": {**server, "drain_delay_seconds": 0}, "backends": [{"url": backend_url}]}
    folder.chmod(0o755)
    (folder / "gateway.yaml").write_text(yaml.safe_dump(document))
    return port, admin_port


@contextmanager
def serving(containers: Runtime, folder: Path, engine_url: str) -> Iterator[Served]:
    """A container with the image's default command, ready to serve."""
    config = folder / "config"
    config.mkdir()
    port, admin_port = write_config(config, engine_url)
    log = folder / "gateway.log"
    with containers.running(None, config, log) as container:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: serves(f"{url}/readyz"), container.process.poll, WAIT_SECONDS)
        except ServerFailed as failed:
            raise AssertionError(f"the gateway {failed}; its output: {log.read_text(errors='replace')}") from None
        yield Served(container, url, f"http://127.0.0.1:{admin_port}")


@pytest.fixture(scope="session")
def served(containers: Runtime, engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One such gateway for all tests that leave it running."""
    with serving(containers, tmp_path_factory.mktemp("served"), engine_url) as running:
        yield running
