"""A request collects the answers to its pieces; what comes first decides."""

from gateway.embeddings.delivery import BufferedResponse
from gateway.embeddings.fair_queue import Piece
from gateway.embeddings.waiter import SendUnchanged, Waiter
from gateway.embeddings.wire import Vectors, inputs_of
from gateway.errors import BackendBusy
from gateway.observe.record import Record
from gateway.request import Demand, InferenceRequest, Kind
from gateway.resources import Holding, MemoryBudget
from tests.unit.scheduling.virtual_time import run


def waiter(*lengths: int) -> Waiter:
    inputs = inputs_of({"model": "m", "input": ["a"] * sum(lengths)}, "m")
    assert inputs is not None
    request = InferenceRequest("embeddings", Kind.POOL, b"POST", b"/x", Demand("m"), "id-1", inputs=inputs)
    made = Waiter(request, inputs, "ann", Record("id-1", "embeddings", 100.0), 100.0)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    made.split_into([Piece(made, start, length, 2, 8) for start, length in zip(starts, lengths, strict=True)])
    return made


def vectors(*names: str) -> Vectors:
    return Vectors({"usage": {}}, [{"embedding": name} for name in names], 0)


def test_its_answer_is_complete_when_every_piece_is_there_in_the_order_of_its_inputs() -> None:
    async def main() -> None:
        made = waiter(2, 1)
        assert not made.whole
        made.answered(made.pieces[1], vectors("other", "c"), 1, 5, exact=True)
        assert not made.outcome.done()
        made.answered(made.pieces[0], vectors("a", "b"), 0, 7, exact=False)
        outcome = made.outcome.result()
        assert isinstance(outcome, Vectors)
        assert [entry["embedding"] for entry in outcome.data] == ["a", "b", "c"]
        assert (outcome.prompt_tokens, outcome.exact) == (12, False)

    run(main())


def test_it_may_be_sent_sendable_unchanged_in_one_piece_whose_answer_needs_no_change() -> None:
    async def main() -> None:
        assert not waiter(2).sendable_unchanged  # floats are wanted
        made = waiter(2)
        made.inputs.wants_floats = False
        assert made.sendable_unchanged
        made.split_into(made.pieces * 2)
        assert not made.sendable_unchanged

    run(main())


def test_its_pieces_are_given_up_when_it_leaves() -> None:
    async def main() -> None:
        made = waiter(1, 1)
        pieces = made.pieces
        made.piece_sent()
        made.piece_sent()
        assert made.release() == pieces
        assert made.release() == []

    run(main())


def test_what_comes_after_its_end_changes_nothing() -> None:
    async def main() -> None:
        made = waiter(1, 1)
        refusal = BufferedResponse(100, Holding(MemoryBudget(100)))
        made.finish(refusal)
        made.finish(SendUnchanged(isolated=True))
        made.failed(BackendBusy("busy"))
        made.answered(made.pieces[0], vectors("a"), 0, 1, exact=True)
        assert made.outcome.result() is refusal

    run(main())


def test_each_has_an_error_of_its_own() -> None:
    async def main() -> None:
        error, made = BackendBusy("busy", retry_after_seconds=2.0), [waiter(1), waiter(1)]
        for each in made:
            each.failed(error)
        errors = [each.outcome.exception() for each in made]
        assert errors[0] is not errors[1]
        for each in errors:
            assert isinstance(each, BackendBusy)
            assert (each.message, each.retry_after_seconds) == ("busy", 2.0)

    run(main())


def test_its_record_has_what_is_known_of_its_batches() -> None:
    async def main() -> None:
        made, batch = waiter(1), Record("b", "embeddings", 100.0)
        made.piece_sent()
        batch.backend, batch.attempts, batch.queue_seconds, batch.first_byte_seconds = "gpu", 2, 0.5, 101.0
        made.batch_ended(batch, 0.25)
        made.fill_record()
        record = made.record
        assert (record.backend, record.attempts, record.queue_seconds) == ("gpu", 2, 0.75)
        assert record.first_byte_seconds == 101.0

    run(main())
