"""Each client of a shared batch of texts gets its own token count, where a tokenizer counts meanwhile."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest

from gateway.core.errors import BackendFault
from gateway.features.exact.tokenization import NotCounted
from tests.unit.embeddings.scene import BAD, CONTEXT_TOKENS, Scene, answer, expected, refusal, tokens, vectors_in
from tests.unit.front.wires import FakeWire
from tests.unit.scheduling.virtual_time import run, turns

TEXTS = ["one", "two words", "three words here", "and four of them"]


def with_tokenizer(*given: Any, **options: Any) -> Scene:
    scene = Scene(*given, **options)
    scene.tokenizer.is_configured = True
    return scene


def usage_of(wire: FakeWire) -> int:
    usage = orjson.loads(wire.body)["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"]
    return int(usage["prompt_tokens"])


def counted(scene: Scene) -> dict[str, float]:
    return {result: count for (_, result), count in scene.counted.counted.values.items()}


def check_answers(wires: list[FakeWire], given: list[Any], kind: bytes) -> None:
    for wire, each in zip(wires, given, strict=True):
        items = each if isinstance(each, list) else [each]
        assert vectors_in(wire) == expected(items)
        assert wire.header(b"x-gateway-usage") == kind
        if kind == b"exact":
            assert usage_of(wire) == sum(map(tokens, items))
    total = sum(tokens(item) for each in given for item in (each if isinstance(each, list) else [each]))
    assert sum(map(usage_of, wires)) == total


def test_texts_that_share_a_batch_are_counted_while_the_backend_has_them() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        given = [*TEXTS, ["a list", "of texts in one request"], ""]
        wires = await scene.ask_all(*given, encoding="float")
        check_answers(wires, given, b"exact")
        assert (scene.sizes, counted(scene)) == ([7], {"counted": 1})
        assert scene.records[0].queue_seconds == 0.0
        assert scene.clock() == pytest.approx(scene.sent[0].at + 0.017), "no client has waited for the tokenizer"
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_tokenizer_that_is_slower_than_the_backend_is_waited_for() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        scene.tokenizer.seconds = 0.05
        wires = await scene.ask_all(*TEXTS)
        check_answers(wires, list(TEXTS), b"exact")
        assert scene.clock() == pytest.approx(scene.sent[0].at + 0.05)
        assert scene.batcher.sizes_of(scene.coalescer, "m").overhead_seconds < 0.02, "that says nothing of the backend"
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_no_request_is_counted_that_has_the_backends_own_count(encoding: str) -> None:
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


@pytest.mark.parametrize("trouble", NotCounted)
def test_usage_that_is_not_counted_is_estimated(trouble: NotCounted) -> None:
    async def main() -> None:
        scene = with_tokenizer()
        scene.tokenizer.trouble = trouble
        wires = await scene.ask_all(*TEXTS)
        check_answers(wires, list(TEXTS), b"estimated")
        assert counted(scene) == {trouble.value: 1}
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize(("fields", "special"), [({}, True), ({"add_special_tokens": False, "dimensions": 4}, False)])
def test_special_tokens_are_counted_as_the_clients_want_them(fields: dict[str, Any], special: bool) -> None:
    async def main() -> None:
        scene = with_tokenizer()
        await scene.ask_all(*TEXTS, fields=fields)
        assert scene.tokenizer.asked == [(TEXTS, special)]
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize(
    "fields", [{"truncate_prompt_tokens": 4}, {"truncate_prompt_tokens": 4, "truncation_side": "left"}]
)
def test_what_the_backend_cuts_off_is_not_counted(fields: dict[str, Any]) -> None:
    async def main() -> None:
        scene = with_tokenizer()
        scene.fault = lambda _backend, items: counting(items, lambda item: min(4, tokens(item)))
        wires = await scene.ask_all(*TEXTS, fields=fields)
        assert [usage_of(wire) for wire in wires] == [3, 4, 4, 4]
        assert {wire.header(b"x-gateway-usage") for wire in wires} == {b"exact"}
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_text_that_is_cut_to_the_context_has_its_length() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        texts = ["one", "so many words " * 90]
        scene.fault = lambda _backend, items: counting(items, lambda item: min(CONTEXT_TOKENS, tokens(item)))
        async with asyncio.TaskGroup() as group:
            sizes = scene.batcher.sizes_of(scene.coalescer, "m")
            for _ in range(50):
                sizes.answered(1, 1000, 10, 0.01, are_ids=False)  # so that it does not look long
            asking = [group.create_task(scene.ask(text, fields={"truncate_prompt_tokens": -1})) for text in texts]
        assert [usage_of(task.result()) for task in asking] == [3, CONTEXT_TOKENS]
        assert counted(scene) == {"counted": 1}
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("fields", [{"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -5}])
def test_a_length_that_is_none_is_the_backends_to_judge(fields: dict[str, Any]) -> None:
    async def main() -> None:
        scene = with_tokenizer()
        wires = await scene.ask_all(*TEXTS, fields=fields)
        assert {wire.header(b"x-gateway-usage") for wire in wires} == {b"estimated"}
        assert (scene.tokenizer.asked, counted(scene)) == ([], {"fields": 1})
        await scene.check_that_nothing_is_left()

    run(main())


def test_counts_that_are_not_the_backends_are_not_called_exact() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        scene.fault = lambda _backend, items: counting(items, lambda item: tokens(item) + (item == "one"))
        wires = await scene.ask_all(*TEXTS)
        assert {wire.header(b"x-gateway-usage") for wire in wires} == {b"estimated"}
        assert sum(map(usage_of, wires)) == sum(map(tokens, TEXTS)) + 1
        assert counted(scene) == {"differs": 1}
        await scene.check_that_nothing_is_left()

    run(main())


def counting(items: list[Any], count: Callable[[Any], int]) -> bytes:
    """An engine's answer, with the tokens counted like this."""
    document = orjson.loads(answer("x", items, floats=False))
    document["usage"]["prompt_tokens"] = sum(map(count, items))
    return orjson.dumps(document)


def test_a_batch_that_is_refused_is_not_waited_for() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        scene.tokenizer.seconds = 10.0
        wires = await scene.ask_all("one", BAD, "two words")
        assert [sent.items for sent in scene.sent[1:]] == [["one"], [BAD], ["two words"], [BAD]]
        assert (wires[1].status, wires[1].body) == (400, refusal([BAD]))
        check_answers([wires[0], wires[2]], ["one", "two words"], b"exact")
        assert (scene.tokenizer.cancelled, counted(scene)) == (1, {})
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_batch_that_fails_is_not_waited_for() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        scene.tokenizer.seconds = 10.0
        scene.fault = lambda _backend, _items: BackendFault("broken")
        wires = await scene.ask_all(*TEXTS)
        assert {wire.status for wire in wires} == {502}
        assert scene.clock() < 1.0 + scene.sent[0].at
        assert scene.tokenizer.cancelled == 1
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_backend_that_is_not_verified_any_more_makes_usage_an_estimate() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        scene.fault = lambda backend, _items: scene.tokenizer.unverified.add(backend)
        wires = await scene.ask_all(*TEXTS)
        check_answers(wires, list(TEXTS), b"estimated")
        assert counted(scene) == {"unverified": 1}
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("leaving", [range(1), range(3), range(4)], ids=["one", "all but one", "all"])
@pytest.mark.parametrize("counting_seconds", [0.004, 0.030], ids=["counted before", "counted after"])
@pytest.mark.parametrize("at", range(12))
def test_clients_may_leave_at_any_time(leaving: range, counting_seconds: float, at: int) -> None:
    """The backend takes 14 ms."""

    async def main() -> None:
        scene = with_tokenizer()
        scene.tokenizer.seconds = counting_seconds
        tasks = [asyncio.create_task(scene.ask(text, f"id-{number}")) for number, text in enumerate(TEXTS)]
        await turns(3)
        seconds = 0.0029 * at
        await asyncio.sleep(seconds)
        for number in leaving:
            tasks[number].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        stayed = outcomes[len(leaving) :]
        for wire, text in zip(stayed, TEXTS[len(leaving) :], strict=True):
            assert isinstance(wire, FakeWire)
            assert (vectors_in(wire), usage_of(wire)) == (expected([text]), tokens(text))
            assert wire.header(b"x-gateway-usage") == b"exact"
        await turns(2)
        assert scene.tokenizer.cancelled == (not stayed and seconds < counting_seconds)
        assert [sent.aborted for sent in scene.sent] == [not stayed and seconds < 0.014]
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_request_that_waits_for_a_count_when_the_gateway_ends_is_refused() -> None:
    async def main() -> None:
        scene = with_tokenizer()
        scene.tokenizer.seconds = 10.0
        async with AsyncExitStack() as stack:
            stack.push_async_callback(scene.batcher.stop)
            tasks = [asyncio.create_task(scene.ask(text)) for text in TEXTS]
            await asyncio.sleep(1.0)
        assert [wire.status for wire in await asyncio.gather(*tasks)] == [503] * 4
        assert scene.tokenizer.cancelled == 1
        await scene.check_that_nothing_is_left()

    run(main())
