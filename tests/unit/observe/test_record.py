from gateway.core.observe.record import Record


def test_a_new_record_says_that_nothing_happened_yet() -> None:
    record = Record("id", "chat", 1.0)
    assert (record.outcome, record.backend, record.attempts, record.status) == ("", "", 0, 0)
    assert record.first_byte_seconds is None
    assert record.actual_hit_tokens is None


def test_it_has_no_place_for_prompts_or_keys() -> None:
    names = set(Record.__annotations__)
    assert names.isdisjoint({"prompt", "messages", "body", "key", "authorization"})
