"""Cores and ports are chosen so that the parties do not disturb each other."""

import socket

import pytest

from tests.bench.place import Cores, choose_cores, choose_ports, is_free


def test_on_two_cores_the_harness_shares_the_loads() -> None:
    assert choose_cores({0, 1}, lambda core: {core}) == Cores(proxy=0, load=1, harness=1)


def test_the_load_keeps_off_the_hardware_thread_beside_the_proxy() -> None:
    assert choose_cores({0, 1, 2, 3}, lambda core: {core, core ^ 1}) == Cores(proxy=0, load=2, harness=2)
    assert choose_cores(range(8), lambda core: {core % 4, core % 4 + 4}) == Cores(proxy=0, load=1, harness=2)


def test_two_threads_of_one_core_have_to_do_if_there_is_nothing_else() -> None:
    assert choose_cores({4, 5}, lambda _: {4, 5}) == Cores(proxy=4, load=5, harness=5)


def test_one_core_is_not_enough() -> None:
    with pytest.raises(ValueError, match="two cores"):
        choose_cores({3}, lambda core: {core})


def test_ports_that_are_taken_are_passed_over() -> None:
    ports = choose_ports(free=lambda port: port not in {8100, 9200, 9202})
    assert (ports.proxy, ports.metrics, ports.engines) == (8101, 8700, (9201, 9203))
    assert ports.backends == ["http://127.0.0.1:9201", "http://127.0.0.1:9203"]


def test_engines_that_run_keep_their_ports() -> None:
    ports = choose_ports((9201, 9203), free=lambda port: port not in {8700, 8701})
    assert (ports.proxy, ports.metrics, ports.engines) == (8100, 8702, (9201, 9203))


def test_a_port_is_free_until_something_listens_on_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)
