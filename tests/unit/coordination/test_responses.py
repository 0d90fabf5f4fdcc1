"""A response that one gateway stored can be continued through every other one."""

import msgspec
import pytest

from gateway.features.coordination.responses import ResponseExchange
from gateway.features.responses.stored import Place, StoredResponses

ANN, BOB = ("ann", "team"), ("bob", "team")
PLACE = Place("a", "m", ANN, alias="alias")


class Gateway:
    """Its stored responses, and what it tells others of them."""

    def __init__(self) -> None:
        self.stored = StoredResponses()
        self.exchange = ResponseExchange(self.stored)

    def send(self, *peers: "Gateway") -> int:
        """Send all messages that are due; returns how many."""
        count = 0
        while (message := self.exchange.due()) is not None:
            self.exchange.sent()
            count += 1
            for peer in peers:
                assert peer.exchange.receive(message)
        return count


@pytest.fixture
def one() -> Gateway:
    return Gateway()


@pytest.fixture
def other() -> Gateway:
    return Gateway()


def test_a_peer_finds_the_response_of_this_client_and_of_no_other(one: Gateway, other: Gateway) -> None:
    one.stored.remember(b'{"id": "resp_1"', PLACE)
    assert one.send(other) == 1
    assert other.stored.find("resp_1", ANN) == PLACE
    assert other.stored.find("resp_1", BOB) is None


def test_what_a_peer_sent_is_not_sent_on(one: Gateway, other: Gateway) -> None:
    one.stored.remember(b'{"id": "resp_1"', PLACE)
    one.send(other)
    assert other.send(one) == 0


def test_a_response_that_is_known_keeps_its_place(one: Gateway, other: Gateway) -> None:
    one.stored.remember(b'{"id": "resp_1"', PLACE)
    other.stored.remember(b'{"id": "resp_1"', Place("b", "m", BOB))
    one.send(other)
    assert other.stored.find("resp_1", BOB) == Place("b", "m", BOB)
    assert other.stored.find("resp_1", ANN) is None


def test_a_new_peer_gets_what_is_known_in_several_messages(one: Gateway, other: Gateway) -> None:
    for number in range(1000):
        one.stored.remember(b'{"id": "resp_%d"' % number, PLACE)
    one.send()
    one.exchange.peer_joined()
    assert one.send(other) == 4
    assert [name for name, _ in other.stored.since(0)] == [name for name, _ in one.stored.since(0)]


def test_a_message_stays_due_until_it_is_sent(one: Gateway) -> None:
    one.stored.remember(b'{"id": "resp_1"', PLACE)
    assert one.exchange.due() == one.exchange.due() is not None
    one.exchange.sent()
    assert one.exchange.due() is None


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"x" * (1 << 21), msgspec.msgpack.encode(["0", []]), b"\x92\xa11\x91\x91\xa1x"]
)
def test_a_message_that_is_not_as_expected_changes_nothing(one: Gateway, data: bytes) -> None:
    assert not one.exchange.receive(data)
    assert one.stored.since(0) == []
