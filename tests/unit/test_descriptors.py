"""The limit of open files: raised, divided, and distinguished from failures of backends."""

import errno
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.file import parse
from gateway.core.resources import are_used_up, fitted, operator_connections, raise_limit


@contextmanager
def soft_limit(limit: int) -> Iterator[int]:
    """A soft limit for this process while the block runs; gives the hard one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    with soft_limit(256) as hard:
        assert raise_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert raise_limit() == hard


@given(st.integers(8, 100_000), st.integers(1, 100_000), st.integers(1, 8))
def test_clients_leave_a_descriptor_for_each_of_their_requests_and_some_for_each_backend(
    limit: int, wanted: int, backends: int
) -> None:
    document = {
        "server": {"max_connections": wanted},
        "backends": [{"url": f"http://10.0.0.{number}:8000"} for number in range(backends)],
    }
    config = parse(document)
    most = fitted(config, limit).server.max_connections
    assert 1 <= most <= wanted
    reserved = 16 * backends + 2 * operator_connections(limit) + 18  # two ports for operators, and what is always open
    assert most == 1 or 2 * most + reserved <= limit
    assert most == wanted or 2 * (most + 1) + reserved > limit


def test_the_ports_for_operators_take_a_small_part_of_the_descriptors() -> None:
    assert [operator_connections(limit) for limit in (8, 256, 1024, 2048, 1_048_576)] == [7, 8, 32, 64, 64]
    assert operator_connections(resource.RLIM_INFINITY) == 64


def test_without_a_limit_the_configuration_stays_as_it_is() -> None:
    config = parse({"backends": [{"url": "http://10.0.0.1:8000"}]})
    assert fitted(config, resource.RLIM_INFINITY) is config


@pytest.mark.parametrize(
    ("error", "used_up"),
    [
        (OSError(errno.EMFILE, "too many open files"), True),
        (OSError(errno.ENFILE, "too many open files in system"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False),
        (TimeoutError(), False),
        (socket.gaierror(socket.EAI_AGAIN, "temporary failure"), False),
        (None, False),
    ],
)
def test_only_some_failures_to_connect_are_the_gateways_own(error: BaseException | None, used_up: bool) -> None:
    assert are_used_up(error) == used_up


def test_a_name_that_cannot_be_resolved_is_the_gateways_own_fault_only_where_nothing_can_be_opened() -> None:
    with soft_limit(3):  # those below are open: standard input, output and error
        assert are_used_up(socket.gaierror(socket.EAI_AGAIN, "temporary failure"))
