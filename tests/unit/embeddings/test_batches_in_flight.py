"""How batches queue, what is counted of them, and what an internal error of the gateway means."""

import asyncio
from base64 import b64encode
from math import ceil, log2

import orjson
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.embeddings.scene import BAD, Item, Scene, answer, expected, refusal, vectors_in
from tests.unit.scheduling.virtual_time import run, turns


def test_a_batch_of_one_tenant_stands_in_line_as_that_tenant() -> None:
    async def main() -> None:
        scene = Scene()
        await asyncio.gather(*(scene.ask(f"t{n}", tenant="ann", weight=2.0) for n in range(3)))
        ask = scene.sent[0].request.demand
        assert (ask.tenant, ask.weight, ask.sequences, ask.divisible, ask.batch) == ("ann", 2.0, 3, True, False)

    run(main())


def test_a_batch_counts_with_the_tokens_of_its_texts_as_learned_from_answers() -> None:
    async def main() -> None:
        scene = Scene()
        text = "word " * 100  # the engine counts two tokens more than words
        for turn in range(40):
            await asyncio.gather(*(scene.ask(f"{text}{turn} {n}") for n in range(4)))
        first, last = (scene.sent[at].request.demand for at in (0, -1))
        assert 4 * 100 < first.prompt_tokens < 4 * 150
        assert last.prompt_tokens == pytest.approx(4 * 104, rel=0.02)
        assert last.sequences == 4

    run(main())


def test_a_batch_of_several_stands_for_all_of_them_and_ends_with_the_last_deadline() -> None:
    async def main() -> None:
        scene = Scene()
        now = scene.clock()
        await asyncio.gather(
            scene.ask("a", tenant="ann", weight=2.0, deadline_seconds=now + 5),
            scene.ask("b", tenant="bob", deadline_seconds=now + 9),
        )
        await asyncio.gather(scene.ask("a", tenant="ann", deadline_seconds=now + 5), scene.ask("b", tenant="bob"))
        first, second = (sent.request.demand for sent in scene.sent)
        assert (first.tenant, first.weight, first.deadline_seconds) == ("(several)", 3.0, now + 9)
        assert second.deadline_seconds is None

    run(main())


def test_batches_have_names_of_their_own_and_requests_alone_keep_theirs() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.ask_all("a", "b")
        await scene.ask("c", "my-id", encoding="float")
        shared, alone = (sent.request for sent in scene.sent)
        assert (shared.request_id, shared.headers) == ("batch-0", b"x-request-id: batch-0\r\n")
        assert (alone.request_id, alone.headers) == ("my-id", b"x-request-id: my-id\r\ntraceparent: t\r\n")

    run(main())


def test_batches_are_counted() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.ask_all("a", "b", "c")
        counted = scene.counted
        assert counted.batch_items.values[("m",)][1] == [3.0]
        assert counted.batch_tokens.values[("m",)][1][0] > 0
        assert sum(counted.batch_wait.values[("m",)][0]) == 3
        assert counted.flushes.values == {("m", "idle"): 1}

    run(main())


def test_an_internal_error_goes_to_every_client_and_is_logged_once() -> None:
    async def main() -> None:
        scene = Scene()

        def broken(_backend: str, _items: object) -> None:
            raise RuntimeError("broken")

        scene.fault = broken
        with structlog.testing.capture_logs() as events:
            wires = await scene.ask_all("a", "b")
        assert [wire.status for wire in wires] == [500, 500]
        assert [event["event"] for event in events] == ["internal_error"]
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_batch_that_is_aborted_before_its_task_has_run_is_over_all_the_same() -> None:
    async def main() -> None:
        scene = Scene()
        tasks = [asyncio.create_task(scene.ask(f"t{n}")) for n in range(2)]
        while not scene.batcher._sent:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns(3)
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_long_answer_is_handed_out_over_several_turns_of_the_loop() -> None:
    async def main() -> None:
        scene, loop, passed = Scene(), asyncio.get_running_loop(), [0]

        def count() -> None:
            passed[0] += 1
            if passed[0] < 1000:
                loop.call_soon(count)

        def long(_backend: str, items: list[Item]) -> bytes:
            document = orjson.loads(answer("x", items, floats=False))
            for entry in document["data"]:
                entry["embedding"] = b64encode(bytes(4 * 24000)).decode()
            count()
            return orjson.dumps(document)

        scene.fault = long
        ended: list[int] = []

        async def one(text: str) -> None:
            await scene.ask(text)
            ended.append(passed[0])

        await asyncio.gather(*(one(f"text {n}") for n in range(16)))
        assert scene.sizes == [16]
        assert max(ended.count(turn) for turn in ended) <= 3  # of 128,000 bytes each
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("count", [2, 3, 16, 63, 64])
@pytest.mark.parametrize("where", [0, 1, 2, 7, -1])
def test_a_request_that_spoils_a_batch_costs_a_request_for_each_halving_and_two(count: int, where: int) -> None:
    async def main() -> None:
        scene = Scene()
        texts = [f"text {n}" for n in range(count)]
        texts[where % count] = BAD
        wires = await scene.ask_all(*texts)
        assert sum(wire.status != 200 for wire in wires) == 1
        assert len(scene.sent) <= 1 + ceil(log2(count)) + 1 + 1
        for text, wire in zip(texts, wires, strict=True):
            assert wire.body == refusal([BAD]) if text == BAD else vectors_in(wire) == expected([text])
        await scene.check_that_nothing_is_left()

    run(main())


@given(st.lists(st.booleans(), min_size=2, max_size=64), st.lists(st.integers(0, 70), max_size=64))
def test_however_many_spoil_a_batch_all_others_are_answered(bad: list[bool], leave_ms: list[int]) -> None:
    async def main() -> None:
        scene = Scene()
        texts = [BAD if each else f"text {n}" for n, each in enumerate(bad)]
        waits = dict(enumerate(leave_ms))

        async def one(number: int, text: str) -> None:
            async with asyncio.timeout(waits[number] / 1000 if number in waits else None):
                wire = await scene.ask(text, f"id-{number}")
            assert wire.body == refusal([BAD]) if text == BAD else vectors_in(wire) == expected([text])

        ended = await asyncio.gather(*(one(*each) for each in enumerate(texts)), return_exceptions=True)
        assert all(each is None or isinstance(each, TimeoutError) for each in ended)
        if not leave_ms:
            assert len(scene.sent) <= 2 * sum(bad) * ceil(log2(len(bad))) + 4
            assert len(scene.sent) <= 3 * len(bad) + ceil(log2(len(bad))) + 2
        await scene.check_that_nothing_is_left()

    run(main())
