"""The compiled engine and load generator, for tests of both."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loadtest.servers.processes import launch, stop
from tests.bench.install import build_tools, find_compiler
from tests.bench.place import Place


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place with the compiled C programs."""
    if find_compiler() is None:
        pytest.skip("no C compiler (cc, gcc or clang): the benchmark's engine and load generator cannot be built")
    place = Place(tmp_path_factory.mktemp("bench"))
    build_tools(place)
    return place


@contextmanager
def running_engine(place: Place, backends: int = 1) -> Iterator[list[int]]:
    """A mock engine on free ports; gives the ports."""
    core = min(os.sched_getaffinity(0))
    process = launch([str(place.engine), *["0"] * backends], core, subprocess.PIPE, subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        yield [int(port) for port in process.stdout.readline().split()[1:]]
    finally:
        stop(process)
        process.stdout.close()


@pytest.fixture
def engine_port(tools: Place) -> Iterator[int]:
    """The port of a running mock engine."""
    with running_engine(tools) as ports:
        yield ports[0]
