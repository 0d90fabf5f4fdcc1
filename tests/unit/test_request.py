import pickle

from gateway.request import Ask, InferenceRequest, Kind


def test_what_placement_needs_is_small_enough_to_travel() -> None:
    ask = Ask(
        "m",
        keys=(1, 2, 3),
        edges=(128, 256, 300),
        prompt_size=300,
        sequences=2,
        output_tokens=5,
        streams=True,
        pinned="a",
    )
    assert pickle.loads(pickle.dumps(ask)) == ask


def test_by_default_a_request_is_one_sequence_of_unknown_length_that_may_go_anywhere() -> None:
    ask = Ask("m")
    assert (ask.sequences, ask.divisible, ask.output_tokens, ask.pinned, ask.keys) == (1, False, None, None, ())


def test_by_default_a_request_may_be_sent_again_and_hides_nothing() -> None:
    request = InferenceRequest("chat", Kind.GENERATE, b"POST", b"/v1/chat/completions", Ask("m"), "id-1")
    assert request.repeatable
    assert not request.hides_usage
    assert (request.body, request.upload, request.headers) == (b"", None, b"")


def test_kinds_are_spelled_as_they_are_logged() -> None:
    assert [str(kind) for kind in Kind] == ["generate", "pool", "light", "upload"]
