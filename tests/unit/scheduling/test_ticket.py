import pytest

from gateway.scheduling.wait_queue import Ticket
from tests.unit.scheduling.builders import ask


def test_a_ticket_starts_with_what_is_known_of_its_request() -> None:
    ticket = Ticket(ask(prompt_tokens=700, keys=(5, 6)), 3.0, frozenset(), 0.5)
    assert (ticket.arrived_seconds, ticket.prefill_seconds, ticket.turn, ticket.tokens) == (3.0, 0.5, 0.5, 700)
    assert (ticket.waits_among, ticket.waits_until) == ((), 0.0)


@pytest.mark.parametrize("wish", [{"pinned": "a"}, {"rank": 0}, {"sequences": 2}])
def test_only_one_sequence_without_wishes_goes_anywhere(wish: dict[str, object]) -> None:
    assert Ticket(ask(), 0.0, frozenset(), 0.0).goes_anywhere
    assert not Ticket(ask(**wish), 0.0, frozenset(), 0.0).goes_anywhere
    assert not Ticket(ask(), 0.0, frozenset("a"), 0.0).goes_anywhere


def test_a_request_is_late_when_even_its_least_prefill_would_end_after_its_deadline() -> None:
    assert Ticket(ask(deadline_seconds=7.0), 0.0, frozenset(), 0.5).late_seconds == 6.5
    assert Ticket(ask(), 0.0, frozenset(), 0.5).late_seconds == float("inf")
