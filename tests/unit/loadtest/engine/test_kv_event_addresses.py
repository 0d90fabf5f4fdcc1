"""Which endpoints are bound, which are connected to, and how ranks and free ports change them."""

import pytest
import zmq

from loadtest.engine.kv_events import of_rank, publish_address, replay_address


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/events", True),
        ("inproc://events", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://collector:5557", False),
    ],
)
def test_a_publisher_binds_wildcards_and_connects_elsewhere(endpoint: str, binds: bool) -> None:
    assert publish_address(endpoint, 0, "127.0.0.1").binds is binds
    assert replay_address(endpoint, 0, "127.0.0.1").binds


@pytest.mark.parametrize(
    ("endpoint", "rank", "moved"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://*:0", 1, "tcp://*:0"),
        ("inproc://events", 2, "inproc://events_dp2"),
        ("ipc:///run/events", 0, "ipc:///run/events"),
    ],
)
def test_a_ranks_number_is_added_to_the_port(endpoint: str, rank: int, moved: str) -> None:
    assert of_rank(endpoint, rank) == moved


def test_ranks_need_ports() -> None:
    with pytest.raises(ValueError, match="need a tcp or inproc endpoint, not ipc:///run/events"):
        of_rank("ipc:///run/events", 1)


def test_a_free_port_is_reported_with_the_hosts_address_and_bound_again_at_the_next_time() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.PUB) as socket:
            address = publish_address("tcp://*:0", 1, "127.0.0.1").attach(socket)
            assert address.advertised.startswith("tcp://127.0.0.1:")
            assert not address.advertised.endswith(":0")
            with pytest.raises(zmq.ZMQError), context.socket(zmq.PUB) as second:
                address.attach(second)
    finally:
        context.destroy(linger=0)


def test_a_fixed_endpoint_is_reported_as_it_was_configured() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.PUB) as socket:
            assert publish_address("tcp://127.0.0.1:9", 0, "h").attach(socket).advertised == "tcp://127.0.0.1:9"
    finally:
        context.destroy(linger=0)
