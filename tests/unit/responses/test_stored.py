from gateway.features.responses.stored import Place, StoredResponses

ANN, BOB = ("ann", "ann"), ("bob", "bob")
PLACE = Place("a", "m", ANN)


def opening(name: str) -> bytes:
    return b'{"id":"%b","object":"response"' % name.encode()


def test_a_response_is_found_where_it_was_made() -> None:
    stored = StoredResponses()
    stored.remember(opening("resp_1"), PLACE)
    assert stored.find("resp_1", ANN) == PLACE


def test_it_is_found_in_the_first_event_of_a_stream() -> None:
    stored = StoredResponses()
    stored.remember(b'event: response.created\ndata: {"response": {"id" : "resp_x-1"}}\n\n', PLACE)
    assert stored.find("resp_x-1", ANN) == PLACE


def test_another_clients_response_is_not_found() -> None:
    stored = StoredResponses()
    stored.remember(opening("resp_1"), PLACE)
    assert stored.find("resp_1", BOB) is None
    assert stored.find("resp_1", ("ann", "another tenant of the same key")) is None
    assert stored.find("resp_1", ("", "")) is None


def test_an_answer_without_an_id_is_not_remembered() -> None:
    stored = StoredResponses()
    stored.remember(b'{"id":"chatcmpl-1"}', PLACE)
    stored.remember(b"", PLACE)
    assert stored.find("chatcmpl-1", ANN) is None


def test_the_oldest_is_forgotten_beyond_65536() -> None:
    stored = StoredResponses()
    for number in range(65537):
        stored.remember(opening(f"resp_{number}"), PLACE)
    assert stored.find("resp_0", ANN) is None
    assert stored.find("resp_1", ANN) == PLACE
    assert stored.find("resp_65536", ANN) == PLACE


def test_an_id_stays_with_the_client_that_had_it_first() -> None:
    stored = StoredResponses()
    stored.remember(opening("resp_1"), PLACE)
    stored.remember(opening("resp_1"), Place("b", "m", BOB))
    assert stored.find("resp_1", ANN) == PLACE
    assert stored.find("resp_1", BOB) is None
