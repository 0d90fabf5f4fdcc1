"""A request collects the answers to its pieces; what comes first decides."""

from itertools import accumulate

from gateway.core.errors import BackendBusy
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, Kind
from gateway.core.resources import Holding, MemoryBudget
from gateway.features.embeddings.waiter import BufferedResponse, EmbeddingWaiter, SendUnchanged
from gateway.features.embeddings.wire import AnswerForm, Vectors, inputs_of
from tests.unit.scheduling.virtual_time import run


def waiter(*lengths: int, encoding: str = "float") -> EmbeddingWaiter:
    inputs = inputs_of({"model": "m", "input": ["a"] * sum(lengths), "encoding_format": encoding}, "m")
    assert inputs is not None
    request = InferenceRequest("embeddings", Kind.POOL, b"POST", b"/x", Demand("m"), "id-1", work=inputs)
    made = EmbeddingWaiter(request, inputs, "ann", Record("id-1", "embeddings", 100.0), 100.0)
    ends = list(accumulate(lengths))
    ranges = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    made.split(ranges, [2] * sum(lengths), [8] * sum(lengths))
    return made


def vectors(*names: str, tokens: int = 0, exact: bool = True) -> Vectors:
    return Vectors(AnswerForm({"usage": {}}, "data"), [{"embedding": name} for name in names], tokens, exact=exact)


def test_its_answer_is_complete_when_every_piece_is_there_in_the_order_of_its_inputs() -> None:
    async def main() -> None:
        made = waiter(2, 1)
        assert not made.whole
        made.answered(made.pieces[1], vectors("c", tokens=5))
        assert not made.outcome.done()
        made.answered(made.pieces[0], vectors("a", "b", tokens=7, exact=False))
        parts = made.outcome.result()
        assert isinstance(parts, list)
        answer = made.vectors(parts)
        assert [entry["embedding"] for entry in answer.data] == ["a", "b", "c"]
        assert (answer.prompt_tokens, answer.exact) == (12, False)

    run(main())


def test_it_may_be_sent_unread_if_its_answer_needs_no_change() -> None:
    async def main() -> None:
        assert not waiter(2).passes_unread  # floats are wanted
        assert waiter(2, encoding="base64").passes_unread

    run(main())


def test_a_list_that_is_cut_shares_no_batch() -> None:
    async def main() -> None:
        [whole], parts = waiter(3).pieces, waiter(2, 1).pieces
        assert (whole.start, whole.items, whole.tokens, whole.size_bytes, whole.alone) == (0, 3, 6, 24, False)
        assert [(piece.start, piece.items, piece.tokens, piece.alone) for piece in parts] == [
            (0, 2, 4, True),
            (2, 1, 2, True),
        ]

    run(main())


def test_its_pieces_are_given_up_when_it_leaves() -> None:
    async def main() -> None:
        made = waiter(1, 1)
        pieces = made.pieces
        assert made.release() == pieces
        assert made.release() == []

    run(main())


def test_what_comes_after_its_end_changes_nothing() -> None:
    async def main() -> None:
        made = waiter(1, 1)
        refusal = BufferedResponse(100, Holding(MemoryBudget(100)))
        made.finish(refusal)
        made.finish(SendUnchanged.ISOLATED)
        made.failed(BackendBusy("busy"))
        made.answered(made.pieces[0], vectors("a"))
        assert made.outcome.result() is refusal

    run(main())


def test_each_has_an_error_of_its_own() -> None:
    async def main() -> None:
        error, made = BackendBusy("busy", retry_after_seconds=2.0), [waiter(1), waiter(1)]
        for each in made:
            each.failed(error)
        errors = [each.outcome.result() for each in made]
        assert errors[0] is not errors[1]
        for each in errors:
            assert isinstance(each, BackendBusy)
            assert (each.message, each.retry_after_seconds) == ("busy", 2.0)

    run(main())


def test_its_record_has_what_is_known_of_its_batches() -> None:
    async def main() -> None:
        made, batch = waiter(1), Record("b", "embeddings", 100.0)
        batch.backend, batch.attempts, batch.queue_seconds, batch.first_byte_seconds = "gpu", 2, 0.5, 101.0
        made.batch_ended(batch, 0.25)
        record = made.record
        assert (record.backend, record.attempts, record.queue_seconds) == ("gpu", 2, 0.75)
        assert record.first_byte_seconds == 101.0

    run(main())
