"""A source tells everybody who waits for it what concerns them; it is over when nobody does."""

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.embeddings.answer import Vectors
from gateway.embeddings.grouping import inputs_of
from gateway.embeddings.member import ByItself, Refused, Served
from gateway.embeddings.part import Part
from gateway.embeddings.sharing import Computed, Sharer, Source, Wanted
from gateway.errors import DeadlineUnmeetable, WaitExpired
from gateway.observe.record import Record
from gateway.request import Ask, InferenceRequest, Kind
from tests.unit.admission.virtual_time import run

TEXTS = ["a", "b"]


def sharer(texts: list[str], joined: float = 100.0, deadline: float | None = None) -> Sharer:
    inputs = inputs_of({"model": "m", "input": texts}, "m")
    assert inputs is not None
    ask = Ask("m", deadline_seconds=deadline)
    request = InferenceRequest("embeddings", Kind.POOL, b"POST", b"/x", ask, "id-1", inputs=inputs)
    return Sharer(request, inputs, "ann", Record("id-1", "embeddings", joined), joined)


class Ended(list[tuple[list[str], str]]):
    """What was said at the end."""

    def __call__(self, _source: Source, computed: Sequence[Computed], document: dict[str, Any]) -> None:
        self.append(([each.entry["embedding"] for each in computed], document.get("model", "")))


def part_of(first: Sharer, ended: Ended) -> Part:
    part = Part(None, 0, len(first.inputs.items), 4, 8)
    part.owner = Source(first, first.inputs, [text.encode() for text in TEXTS], [1, 3], ended)
    first.awaits(part, [Wanted(at, [at]) for at in range(len(first.inputs.items))])
    return part


def vectors(*names: str) -> Vectors:
    return Vectors({"model": "m"}, [{"embedding": name} for name in names], 0)


def test_each_gets_its_inputs_in_its_places_and_tokens_that_are_exact_as_far_as_they_are_told() -> None:
    async def main() -> None:
        ended, first, second = Ended(), sharer(TEXTS), sharer(["b", "x", "b"])
        part = part_of(first, ended)
        second.knows({1: Computed({"embedding": "known"}, 7, True)})
        second.awaits(part, [Wanted(1, [0, 2])])
        part.owner.answered(part, vectors("other", "A", "B"), 1, 8, exact=True)
        whole, some = first.outcome.result(), second.outcome.result()
        assert isinstance(whole, Served)
        assert isinstance(some, Served)
        assert [entry["embedding"] for entry in whole.data] == ["A", "B"]
        assert [entry["embedding"] for entry in some.data] == ["B", "known", "B"]
        assert (whole.tokens, whole.exact) == (8, True)
        assert (some.tokens, some.exact) == (6 + 7 + 6, False)
        assert ended == [(["A", "B"], "m")]

    run(main())


def test_it_is_given_up_when_the_last_has_left_and_not_before() -> None:
    async def main() -> None:
        ended, first, second = Ended(), sharer(TEXTS), sharer(["b"])
        part = part_of(first, ended)
        second.awaits(part, [Wanted(1, [0])])
        assert (first.leaves(), ended) == ([], [])
        assert "1 requests" in repr(part.owner)
        assert second.leaves() == [part]
        assert ended == [([], "")]
        assert (first.leaves(), second.leaves()) == ([], [])

    run(main())


def test_who_comes_when_it_is_in_a_batch_does_not_wait_for_one() -> None:
    async def main() -> None:
        first, second = sharer(TEXTS), sharer(["b"], joined=103.0)
        part = part_of(first, Ended())
        assert first.waits_for_batch
        part.owner.taken()
        second.awaits(part, [Wanted(1, [0])])
        assert (first.waits_for_batch, second.waits_for_batch) == (False, False)
        batch = Record("b", "embeddings", 100.0)
        batch.backend, batch.attempts, batch.queue_seconds = "gpu", 1, 2.0
        part.owner.sent(batch, 2.0)
        for each in (first, second):
            each.tell_record()
        assert (first.record.queue_seconds, second.record.queue_seconds) == (4.0, 1.0)
        assert (second.record.backend, second.record.attempts) == ("gpu", 1)

    run(main())


def test_its_deadline_is_the_latest_of_those_who_wait() -> None:
    async def main() -> None:
        first, second = sharer(TEXTS, deadline=105.0), sharer(["b"], deadline=109.0)
        part = part_of(first, Ended())
        assert part.owner.deadline_seconds == 105.0
        second.awaits(part, [Wanted(1, [0])])
        assert part.owner.deadline_seconds == 109.0
        third = sharer(["b"])
        third.awaits(part, [Wanted(1, [0])])
        assert part.owner.deadline_seconds is None

    run(main())


def test_a_deadline_that_has_passed_ends_only_those_whose_it_is() -> None:
    async def main() -> None:
        first, later, never = sharer(TEXTS, deadline=105.0), sharer(["b"], deadline=106.0), sharer(["b"])
        part = part_of(first, Ended())
        part.owner.taken()
        for each in (later, never):
            each.awaits(part, [Wanted(1, [0])])
        part.owner.failed(DeadlineUnmeetable("late"))
        assert isinstance(first.outcome.exception(), DeadlineUnmeetable)
        assert later.outcome.result() == never.outcome.result() == ByItself(isolated=True)

    run(main())


@pytest.mark.parametrize("outcome", [ByItself(isolated=True), Refused(400, b"", b"", b"words")])
def test_a_refusal_is_passed_on_only_to_who_asked_for_just_this(outcome: ByItself | Refused) -> None:
    async def main() -> None:
        ended, first, second, same = Ended(), sharer(TEXTS), sharer(["b"]), sharer(TEXTS)
        part = part_of(first, ended)
        second.awaits(part, [Wanted(1, [0])])
        same.awaits(part, [Wanted(0, [0]), Wanted(1, [1])])
        part.owner.ends(outcome)
        assert first.outcome.result() == same.outcome.result() == outcome
        assert second.outcome.result() == ByItself(isolated=True)
        assert ended == [([], "")]

    run(main())


def test_a_failure_is_that_of_all() -> None:
    async def main() -> None:
        first, second = sharer(TEXTS), sharer(["b"])
        part = part_of(first, Ended())
        second.awaits(part, [Wanted(1, [0])])
        part.owner.failed(WaitExpired("busy"))
        errors = [each.outcome.exception() for each in (first, second)]
        assert all(isinstance(error, WaitExpired) for error in errors)
        assert errors[0] is not errors[1]

    run(main())
