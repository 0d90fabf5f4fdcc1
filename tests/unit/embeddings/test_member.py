"""A request gathers what comes of its parts; what comes first decides."""

from gateway.embeddings.members import ByItself, Member, Part, Refused, Served
from gateway.embeddings.wire import Vectors, inputs_of
from gateway.errors import BackendBusy
from gateway.observe.record import Record
from gateway.request import Ask, InferenceRequest, Kind
from tests.unit.scheduling.virtual_time import run


def member(*lengths: int) -> Member:
    inputs = inputs_of({"model": "m", "input": ["a"] * sum(lengths)}, "m")
    assert inputs is not None
    request = InferenceRequest("embeddings", Kind.POOL, b"POST", b"/x", Ask("m"), "id-1", inputs=inputs)
    made = Member(request, inputs, "ann", Record("id-1", "embeddings", 100.0), 100.0)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    made.consists_of([Part(made, start, length, 2, 8) for start, length in zip(starts, lengths, strict=True)])
    return made


def vectors(*names: str) -> Vectors:
    return Vectors({"usage": {}}, [{"embedding": name} for name in names], 0)


def test_its_answer_is_complete_when_every_part_is_there_in_the_order_of_its_inputs() -> None:
    async def main() -> None:
        made = member(2, 1)
        assert not made.whole
        made.answered(made.parts[1], vectors("other", "c"), 1, 5, exact=True)
        assert not made.outcome.done()
        made.answered(made.parts[0], vectors("a", "b"), 0, 7, exact=False)
        outcome = made.outcome.result()
        assert isinstance(outcome, Served)
        assert [entry["embedding"] for entry in outcome.data] == ["a", "b", "c"]
        assert (outcome.tokens, outcome.exact) == (12, False)

    run(main())


def test_it_may_be_sent_as_it_came_in_one_piece_whose_answer_needs_no_change() -> None:
    async def main() -> None:
        assert not member(2).as_it_came  # floats are wanted
        made = member(2)
        made.inputs.wants_floats = False
        assert made.as_it_came
        made.consists_of(made.parts * 2)
        assert not made.as_it_came

    run(main())


def test_its_parts_are_given_up_when_it_leaves() -> None:
    async def main() -> None:
        made = member(1, 1)
        parts = made.parts
        made.taken()
        made.taken()
        assert made.leaves() == parts
        assert made.leaves() == []

    run(main())


def test_what_comes_after_its_end_changes_nothing() -> None:
    async def main() -> None:
        made = member(1, 1)
        made.ends(Refused(400, b"", b"", b""))
        made.ends(ByItself(isolated=True))
        made.failed(BackendBusy("busy"))
        made.answered(made.parts[0], vectors("a"), 0, 1, exact=True)
        assert made.outcome.result() == Refused(400, b"", b"", b"")

    run(main())


def test_each_has_an_error_of_its_own() -> None:
    async def main() -> None:
        error, made = BackendBusy("busy", retry_after_seconds=2.0), [member(1), member(1)]
        for each in made:
            each.failed(error)
        errors = [each.outcome.exception() for each in made]
        assert errors[0] is not errors[1]
        for each in errors:
            assert isinstance(each, BackendBusy)
            assert (each.message, each.retry_after_seconds) == ("busy", 2.0)

    run(main())


def test_its_record_tells_of_its_batches() -> None:
    async def main() -> None:
        made, batch = member(1), Record("b", "embeddings", 100.0)
        made.taken()
        batch.backend, batch.attempts, batch.queue_seconds, batch.first_byte_seconds = "gpu", 2, 0.5, 101.0
        made.sent(batch, 0.25)
        made.tell_record()
        record = made.record
        assert (record.backend, record.attempts, record.queue_seconds) == ("gpu", 2, 0.75)
        assert record.first_byte_seconds == 101.0

    run(main())
