import pytest

from tests.unit.scheduling.builders import ask, ticket


def test_a_ticket_starts_with_what_is_known_of_its_request() -> None:
    joining = ticket(ask(prompt_tokens=700, keys=(5, 6), deadline_seconds=7.0), 3.0, 0.5, turn=0.7)
    assert (joining.arrived_seconds, joining.late_seconds, joining.turn, joining.tokens) == (3.0, 6.5, 0.7, 700)
    assert (joining.waits_among, joining.waits_until) == ((), 0.0)


@pytest.mark.parametrize("wish", [{"pinned": "a"}, {"rank": 0}, {"sequences": 2}])
def test_only_one_sequence_without_wishes_goes_anywhere(wish: dict[str, object]) -> None:
    assert ticket(ask()).goes_anywhere
    assert not ticket(ask(**wish)).goes_anywhere
    assert not ticket(ask(), avoid=frozenset("a")).goes_anywhere


def test_a_request_is_late_when_even_its_least_prefill_would_end_after_its_deadline() -> None:
    assert ticket(ask(deadline_seconds=7.0), 0.0, 0.5).late_seconds == 6.5
    assert ticket(ask(), 0.0, 0.5).late_seconds == float("inf")
