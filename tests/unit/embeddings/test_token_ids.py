"""Batches of several clients' texts go as token ids where these are known, so that each client's usage is its own."""

import asyncio
from typing import Any

import orjson
import pytest

from gateway.tokenization.tokenization import NotEncoded
from tests.unit.admission.virtual_time import run, turns
from tests.unit.embeddings.scene import BAD, Scene, answer, expected, refusal, tokens, vectors_in
from tests.unit.front.wires import FakeWire

TEXTS = ["one", "two words", "three words here", "and four of them"]


def with_tokenizer(*given: Any, **options: Any) -> Scene:
    scene = Scene(*given, **options)
    scene.tokenizer.is_configured = True
    return scene


def usage_of(wire: FakeWire) -> int:
    usage = orjson.loads(wire.body)["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"]
    return int(usage["prompt_tokens"])


def went_as_ids(scene: Scene) -> list[bool]:
    return [isinstance(sent.body["input"][0], list) for sent in scene.sent]


def counted(scene: Scene) -> dict[str, float]:
    return {result: count for (_, result), count in scene.counted.as_ids.values.items()}


def check_answers(wires: list[FakeWire], given: list[Any], kind: bytes) -> None:
    for wire, each in zip(wires, given, strict=True):
        items = each if isinstance(each, list) else [each]
        assert vectors_in(wire) == expected(items)
        assert wire.header(b"x-gateway-usage") == kind
        if kind == b"exact":
            assert usage_of(wire) == sum(map(tokens, items))
    total = sum(tokens(item) for each in given for item in (each if isinstance(each, list) else [each]))
    assert sum(map(usage_of, wires)) == total


def test_texts_that_share_a_batch_go_as_ids_and_each_usage_is_counted() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        given = [*TEXTS, ["a list", "of texts in one request"], ""]
        wires = await scene.ask_all(*given, encoding="float")
        check_answers(wires, given, b"exact")
        assert (scene.sizes, went_as_ids(scene), counted(scene)) == ([7], [True], {"sent": 1})
        assert scene.sent[0].body.keys() == {"model", "encoding_format", "input"}
        assert scene.sent[0].request.ask.size_bytes == len(scene.sent[0].request.body)
        assert scene.records[0].queue_seconds == pytest.approx(scene.tokenizer.seconds), "it has waited for its ids"
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_nobody_waits_for_ids_who_has_the_backends_own_count(encoding: str) -> None:
    async def main() -> None:
        scene = with_tokenizer(max_batch_items=8)
        alone = await scene.ask("a text", encoding=encoding)
        long = [f"text {number}" for number in range(20)]
        listed = await scene.ask(long, encoding=encoding)
        ids = await scene.ask_all([1, 2, 3], [4, 5], encoding=encoding)
        assert [usage_of(wire) for wire in (alone, listed, *ids)] == [4, 80, 3, 2]
        assert {wire.header(b"x-gateway-usage") for wire in (alone, listed, *ids)} == {b"exact"}
        assert scene.tokenizer.asked == []
        assert counted(scene) == {}
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("trouble", NotEncoded)
def test_what_is_not_told_as_ids_goes_as_texts_and_usage_is_estimated(trouble: NotEncoded) -> None:
    async def main() -> None:
        scene = with_tokenizer()
        scene.tokenizer.trouble = trouble
        wires = await scene.ask_all(*TEXTS)
        check_answers(wires, list(TEXTS), b"estimated")
        assert (went_as_ids(scene), counted(scene)) == ([False], {trouble.value: 1})
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("fields", [{"truncate_prompt_tokens": 2}, {"truncation_side": "left"}])
def test_texts_that_are_to_be_truncated_are_left_to_the_backend(fields: dict[str, Any]) -> None:
    async def main() -> None:
        scene = with_tokenizer()
        await scene.ask_all(*TEXTS, fields=fields)
        assert (went_as_ids(scene), counted(scene)) == ([False], {"fields": 1})
        assert scene.tokenizer.asked == []
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize(("fields", "special"), [({}, True), ({"add_special_tokens": False, "dimensions": 4}, False)])
def test_special_tokens_are_added_as_the_clients_want(fields: dict[str, Any], special: bool) -> None:
    async def main() -> None:
        scene = with_tokenizer()
        await scene.ask_all(*TEXTS, fields=fields)
        assert scene.tokenizer.asked == [(TEXTS, special)]
        assert went_as_ids(scene) == [True]
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_text_without_any_token_is_the_backends_to_judge() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        await scene.ask_all("one", "", fields={"add_special_tokens": False})
        assert (went_as_ids(scene), counted(scene)) == ([False], {"empty": 1})
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_count_that_is_not_the_backends_is_not_called_exact() -> None:
    async def main() -> None:
        scene = with_tokenizer()

        def counts_one_more(_backend: str, items: list[Any]) -> bytes:
            document = orjson.loads(answer("x", items, floats=False))
            document["usage"]["prompt_tokens"] += 1
            return orjson.dumps(document)

        scene.fault = counts_one_more
        wires = await scene.ask_all(*TEXTS)
        assert went_as_ids(scene) == [True]
        assert {wire.header(b"x-gateway-usage") for wire in wires} == {b"estimated"}
        assert sum(map(usage_of, wires)) == sum(map(tokens, TEXTS)) + 1
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_batch_that_is_refused_is_told_in_the_words_for_each_text() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        wires = await scene.ask_all("one", BAD, "two words")
        assert went_as_ids(scene)[0]
        assert [sent.items for sent in scene.sent[1:]] == [["one"], [BAD], ["two words"]]
        assert not any(isinstance(sent.body["input"], list) for sent in scene.sent[1:])
        assert (wires[1].status, wires[1].body) == (400, refusal([BAD]))
        check_answers([wires[0], wires[2]], ["one", "two words"], b"exact")
        await scene.check_that_nothing_is_left()

    run(main())


def test_vectors_of_a_backend_that_is_not_verified_any_more_are_thrown_away() -> None:
    async def main() -> None:
        scene = with_tokenizer()

        def restarts(_backend: str, _items: list[Any]) -> None:
            scene.tokenizer.unverified.add("a")

        scene.fault = restarts
        wires = await scene.ask_all(*TEXTS)
        assert went_as_ids(scene) == [True, False]
        check_answers(wires, list(TEXTS), b"estimated")
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("leaving", [range(1), range(3), range(4)], ids=["one", "all but one", "all"])
@pytest.mark.parametrize("tenth", range(10))
def test_clients_may_leave_at_any_time(leaving: range, tenth: int) -> None:
    """Encoding takes 4 ms of the batch's 18."""

    async def main() -> None:
        scene = with_tokenizer()
        scene.tokenizer.seconds = 0.004
        tasks = [asyncio.create_task(scene.ask(text, f"id-{number}")) for number, text in enumerate(TEXTS)]
        await turns(4)
        await asyncio.sleep(0.0018 * tenth)
        for number in leaving:
            tasks[number].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        stayed = [outcome for outcome in outcomes if isinstance(outcome, FakeWire)]
        assert len(stayed) == len(TEXTS) - len(leaving)
        for wire, text in zip(stayed, TEXTS[len(leaving) :], strict=True):
            assert (vectors_in(wire), usage_of(wire)) == (expected([text]), tokens(text))
            assert wire.header(b"x-gateway-usage") == b"exact"
        everybody_left_early = not stayed and 0.0018 * tenth < scene.tokenizer.seconds
        assert (scene.tokenizer.cancelled, len(scene.sent)) == ((1, 0) if everybody_left_early else (0, 1))
        await scene.check_that_nothing_is_left()

    run(main())


def test_who_is_being_encoded_when_the_gateway_ends_is_told_so() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        scene.tokenizer.seconds = 10.0
        async with scene.coalescer.running():
            tasks = [asyncio.create_task(scene.ask(text)) for text in TEXTS]
            await asyncio.sleep(0.001)
        assert [wire.status for wire in await asyncio.gather(*tasks)] == [503] * 4
        assert scene.tokenizer.cancelled == 1
        await scene.check_that_nothing_is_left()

    run(main())
