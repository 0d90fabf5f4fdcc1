"""What is known is not asked for again, what is coming is waited for, and nobody can tell by the answer."""

import asyncio
from base64 import b64encode
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from gateway.backends.backend import Facts, ModelCard
from gateway.backends.health import Probe
from gateway.errors import BackendFault
from gateway.observe.record import Record
from gateway.relay.exchange import Answer
from tests.unit.admission.virtual_time import run, turns
from tests.unit.embeddings.scene import BAD, Scene, answer, expected, tokens, vectors_in
from tests.unit.front.wires import FakeWire, reply_on

MUCH = 1_000_000


def document_in(wire: FakeWire) -> Any:
    return orjson.loads(wire.body)


def sources(scene: Scene) -> dict[str, float]:
    return {source: count for (_, source), count in scene.counted.inputs.values.items()}


@pytest.mark.parametrize("first", ["base64", "float"])
@pytest.mark.parametrize("second", ["base64", "float"])
def test_a_text_that_is_known_needs_no_backend_and_is_answered_as_the_backend_would(first: str, second: str) -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        await scene.ask("a text", encoding=first)
        wire = await scene.ask("a text", "my-id", encoding=second)
        assert scene.sizes == [1]
        assert document_in(wire) == orjson.loads(answer("my-id", ["a text"], floats=second == "float"))
        assert list(document_in(wire)) == list(orjson.loads(answer("", ["a text"], floats=False)))
        assert wire.header(b"x-gateway-usage") == b"exact"
        assert wire.header(b"x-gateway-reused-inputs") == b"1"
        assert wire.header(b"x-gateway-backend") is None
        assert scene.records[1].reused_inputs == 1
        assert sources(scene) == {"computed": 1, "cached": 1}
        await scene.check_that_nothing_is_left()

    run(main())


def test_of_a_list_only_what_is_not_known_is_sent() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        await scene.ask(["b", "d"])
        texts: list[Any] = ["a", "b", "c d", "d", "e"]
        wire = await scene.ask(texts, encoding="float")
        assert scene.sent[1].items == ["a", "c d", "e"]
        assert vectors_in(wire) == expected(texts)
        assert wire.header(b"x-gateway-reused-inputs") == b"2"
        assert wire.header(b"x-gateway-backend") == b"a"
        again = await scene.ask(texts)
        assert len(scene.sent) == 2
        assert vectors_in(again) == expected(texts)
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("given", [["a", "b c", "d"], [[1, 2], [3]], ["a", "b c", "a"]])
def test_usage_is_told_as_the_backend_would_and_as_exact_only_where_it_is(given: Any) -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH, deduplicate=True)
        for _ in range(2):
            wire = await scene.ask(given)
            assert document_in(wire)["usage"]["prompt_tokens"] == document_in(wire)["usage"]["total_tokens"]
            if wire.header(b"x-gateway-usage") == b"exact":
                assert document_in(wire)["usage"]["prompt_tokens"] == sum(map(tokens, given))
        exact = wire.header(b"x-gateway-usage") == b"exact"
        assert exact == isinstance(given[0], list)  # of texts in a list, only the sum was told
        await scene.check_that_nothing_is_left()

    run(main())


def test_tokens_that_were_told_of_a_text_alone_stay_exact() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        for text in ("one", "two words"):
            await scene.ask(text)
        wire = await scene.ask(["two words", "one", "two words"])
        assert document_in(wire)["usage"]["prompt_tokens"] == 4 + 3 + 4
        assert wire.header(b"x-gateway-usage") == b"exact"
        assert len(scene.sent) == 2

    run(main())


def test_tokens_of_texts_that_were_counted_are_exact_one_by_one() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        scene.tokenizer.is_configured = True
        await scene.ask_all(["a", "b c"], ["d e f", "g"])
        assert len(scene.sent) == 1
        wire = await scene.ask(["b c", "g", "b c", "d e f"])
        assert document_in(wire)["usage"]["prompt_tokens"] == 4 + 3 + 4 + 5
        assert wire.header(b"x-gateway-usage") == b"exact"
        assert len(scene.sent) == 1
        await scene.check_that_nothing_is_left()

    run(main())


def test_what_many_ask_for_at_once_is_computed_once() -> None:
    async def main() -> None:
        scene = Scene(deduplicate=True)
        wires = await scene.ask_all(*["same"] * 40, *["other"] * 20)
        assert scene.sizes == [2]
        assert [vectors_in(wire) for wire in wires] == [expected(["same"])] * 40 + [expected(["other"])] * 20
        assert [document_in(wire)["id"] for wire in wires] == [f"embd-id-{number}" for number in range(60)]
        assert [record.backend for record in scene.records] == ["a"] * 60
        assert sources(scene) == {"computed": 2, "shared": 58}
        assert len(await scene.ask_all("same", "same")) == 2
        assert len(scene.sent) == 2  # nothing is kept
        await scene.check_that_nothing_is_left()

    run(main())


def test_who_comes_while_it_is_under_way_waits_for_the_same_batch() -> None:
    async def main() -> None:
        scene = Scene(deduplicate=True)
        scene.overhead_seconds = 1.0
        first = asyncio.create_task(scene.ask(["a", "b"]))
        await asyncio.sleep(0.5)
        second = await scene.ask(["b", "c", "b"])
        assert vectors_in(await first) == expected(["a", "b"])
        assert vectors_in(second) == expected(["b", "c", "b"])
        assert [sent.items for sent in scene.sent] == [["a", "b"], ["c"]]
        assert scene.records[1].queue_seconds == pytest.approx(0.0, abs=0.01)
        await scene.check_that_nothing_is_left()

    run(main())


def test_twice_in_one_list_is_computed_once_but_counts_twice() -> None:
    async def main() -> None:
        scene = Scene(deduplicate=True)
        wire = await scene.ask(["two words"] * 3)
        assert scene.sizes == [1]
        assert vectors_in(wire) == expected(["two words"] * 3)
        assert document_in(wire)["usage"]["prompt_tokens"] == 12
        assert wire.header(b"x-gateway-usage") == b"exact"
        kept = Scene(cache_bytes=MUCH)
        await kept.ask(["a", "a"])
        assert kept.sizes == [2]  # only what is kept is used again
        await scene.check_that_nothing_is_left()

    run(main())


def test_two_long_lists_with_the_same_inputs_are_computed_once() -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64, deduplicate=True)
        texts: list[Any] = [f"text {number}" for number in range(300)]
        one, other = await scene.ask_all(texts, texts[::-1])
        assert sum(scene.sizes) == 300
        assert vectors_in(one) == expected(texts)
        assert vectors_in(other) == expected(texts[::-1])
        for wire in (one, other):
            assert document_in(wire)["usage"]["prompt_tokens"] == 4 * 300
            assert wire.header(b"x-gateway-usage") == b"exact"
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("after", range(12))
@pytest.mark.parametrize("given", ["same", ["same", "own"], [*(f"text {number}" for number in range(150)), "same"]])
def test_the_first_may_leave_at_any_moment_and_the_others_have_their_vector(after: int, given: Any) -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64, deduplicate=True, cache_bytes=MUCH)
        first = asyncio.create_task(scene.ask(given, "first"))
        await turns(1)
        others = [asyncio.create_task(scene.ask(each)) for each in ("same", ["same", "more"], ["more", "same", "same"])]
        await turns(after)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        given_to = [vectors_in(wire) for wire in await asyncio.gather(*others)]
        assert given_to == [expected(["same"]), expected(["same", "more"]), expected(["more", "same", "same"])]
        sent = [item for each in scene.sent if not each.aborted for item in each.items]
        assert sent.count("same") <= (2 if len(given) > 8 else 1)  # few do not wait for a long list
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("after", range(10))
def test_what_all_have_left_is_aborted_and_can_be_asked_for_again(after: int) -> None:
    async def main() -> None:
        scene = Scene(deduplicate=True, cache_bytes=MUCH)
        scene.overhead_seconds = 1.0
        tasks = [asyncio.create_task(scene.ask("same")) for _ in range(3)]
        await turns(after)
        for task in tasks:
            task.cancel()
        again = asyncio.create_task(scene.ask("same"))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert vectors_in(await again) == expected(["same"])
        assert all(sent.aborted for sent in scene.sent[:-1])
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_bad_input_fails_each_who_asked_for_it_in_the_engines_own_words_and_nobody_else() -> None:
    async def main() -> None:
        scene = Scene(deduplicate=True, cache_bytes=MUCH)
        good, mixed, bad, two = await scene.ask_all("good", ["good", BAD], BAD, [BAD, BAD])
        assert vectors_in(good) == expected(["good"])
        for wire, given in ((mixed, ["good", BAD]), (bad, [BAD]), (two, [BAD, BAD])):
            assert wire.status == 400
            assert document_in(wire)["error"]["message"] == f"{given.count(BAD)} of {len(given)}"
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_refusal_of_just_what_was_asked_for_is_passed_on() -> None:
    async def main() -> None:
        scene = Scene(deduplicate=True, cache_bytes=MUCH)
        one, other = await scene.ask_all(BAD, BAD)
        assert (one.status, other.status) == (400, 400)
        assert len(scene.sent) == 1
        assert (await scene.ask(BAD)).status == 400
        assert len(scene.sent) == 2  # and not kept
        await scene.check_that_nothing_is_left()

    run(main())


def test_failures_are_told_to_all_but_the_backends_words_only_to_who_asked_for_the_same() -> None:
    async def main() -> None:
        scene = Scene(deduplicate=True, cache_bytes=MUCH)

        def broken(_backend: str, _items: object) -> BackendFault:
            error = BackendFault("broken")
            error.answer = Answer(500, None, None, body=b"about secret", content_type=b"application/json")
            return error

        scene.fault = broken
        one, other, same = await scene.ask_all(["a", "secret"], "a", ["a", "secret"])
        assert [wire.status for wire in (one, other, same)] == [500, 502, 500]
        assert (one.body, same.body) == (b"about secret", b"about secret")
        assert b"secret" not in other.body
        scene.fault = lambda _backend, _items: None
        assert vectors_in(await scene.ask("a")) == expected(["a"])  # failures are not kept
        scene.fault = broken
        rest = await scene.ask(["a", "more"])
        assert (rest.status, rest.body) == (500, b"about secret")  # of what was sent for it alone
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("which", ["isolation", "dimensions", "cache_salt", "ids", "class"])
def test_only_what_must_have_the_same_vector_is_shared_or_kept(which: str) -> None:
    async def main() -> None:
        scene = Scene(deduplicate=True, cache_bytes=MUCH)
        asks: list[tuple[Any, dict[str, Any]]] = {
            "isolation": [("a", {"isolation": name}) for name in ("", "ann", "bob")],
            "dimensions": [("a", {"fields": {"dimensions": size}}) for size in (4, 8)],
            "cache_salt": [("a", {"fields": {"cache_salt": salt}}) for salt in ("x", "y")],
            "ids": [("0", {}), ([48], {}), ([0x30, 0], {})],
            "class": [("a", {}), ("a", {"batch": True})],
        }[which]
        for _ in range(2):
            await asyncio.gather(*(scene.ask(given, **options) for given, options in asks))
        assert sum(scene.sizes) == len(asks)  # each once: at first together, then from memory
        await scene.check_that_nothing_is_left()

    run(main())


def test_few_inputs_do_not_wait_for_a_long_list() -> None:
    async def main() -> None:
        scene = Scene(cap=16, deduplicate=True)
        scene.overhead_seconds = 1.0
        long = asyncio.create_task(scene.ask([f"text {number}" for number in range(100)]))
        await turns(5)
        started = scene.clock()
        assert vectors_in(await scene.ask("text 99")) == expected(["text 99"])
        assert scene.clock() - started < 1.1
        await long
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_deadline_is_that_of_its_own_client() -> None:
    async def main() -> None:
        scene = Scene(deduplicate=True, cap=1)
        scene.overhead_seconds = 1.0
        under_way = [asyncio.create_task(scene.ask(f"text {number}")) for number in range(3)]
        await turns(6)
        now = scene.clock()
        hurried = asyncio.create_task(scene.ask("same", deadline_seconds=now + 0.5))
        await turns(2)
        patient = asyncio.create_task(scene.ask("same"))
        assert (await hurried).status == 429
        assert vectors_in(await patient) == expected(["same"])
        await asyncio.gather(*under_way)
        await scene.check_that_nothing_is_left()

    run(main())


def test_what_a_model_made_before_a_restart_is_forgotten_and_what_is_under_way_is_not_kept() -> None:
    async def main() -> None:
        scene = Scene("ab", deduplicate=True, cache_bytes=MUCH)
        scene.overhead_seconds = 1.0
        await scene.ask("known")
        under_way = asyncio.create_task(scene.ask("coming"))
        await asyncio.sleep(0.5)
        scene.weights = b"new"
        scene.restart("b")
        known, coming = await scene.ask_all("known", "coming")
        assert vectors_in(known) != expected(["known"])
        assert vectors_in(coming) != expected(["coming"])
        assert vectors_in(await under_way) == expected(["coming"])
        assert vectors_in(await scene.ask("coming")) == vectors_in(coming)
        await scene.check_that_nothing_is_left()

    run(main())


def test_what_is_known_is_answered_while_no_backend_is_up_but_not_for_models_that_are_gone() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        await scene.ask("known")
        backend = scene.backend("a")
        for _ in range(3):
            scene.fleet.probed(backend, Probe.REFUSED)
        assert vectors_in(await scene.ask("known")) == expected(["known"])
        scene.fleet.learned(backend, replace(backend.facts, models=(ModelCard("other"),)))
        assert (await scene.ask("known")).status == 404
        assert len(scene.sent) == 1

    run(main())


@pytest.mark.parametrize("odd", ["nan", "text", "floats", "more"])
def test_vectors_that_look_odd_are_passed_on_and_not_kept(odd: str) -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        body = orjson.loads(answer("x", ["a"], floats=odd == "floats"))
        if odd == "nan":
            body["data"][0]["embedding"] = b64encode(np.array([1, np.nan], "<f4").tobytes()).decode()
        elif odd == "text":
            body["data"][0]["embedding"] = "no vector"
        elif odd == "more":
            body["data"][0]["more"] = 1
        scene.fault = lambda _backend, _items: orjson.dumps(body)
        for _ in range(2):
            assert document_in(await scene.ask("a"))["data"][0].get("more") == body["data"][0].get("more")
        assert len(scene.sent) == 2

    run(main())


def test_memory_is_bounded_and_what_was_used_least_lately_goes() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=4000)
        for number in range(20):
            await scene.ask("often")
            await scene.ask(f"text {number}")
        assert [item for sent in scene.sent for item in sent.items].count("often") == 1
        assert scene.reuse is not None
        assert 2000 < scene.reuse.cache.used_bytes <= 4000
        assert scene.counted.evictions.values[()] == scene.reuse.cache.evictions > 10
        assert "bytes" in repr(scene.reuse)

    run(main())


def test_memory_for_less_than_one_answer_keeps_nothing() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=900)  # a vector, but not what else is in an answer
        for _ in range(3):
            assert vectors_in(await scene.ask("a")) == expected(["a"])
        assert len(scene.sent) == 3

    run(main())


def test_explanations_are_not_kept_from_a_backend() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH, deduplicate=True)
        await scene.ask("a", tenant="ann")
        request = scene.request("a")
        request.explains = True
        wire = FakeWire()
        await scene.coalescer.dispatch(request, reply_on(wire), Record("id", "embeddings", 0.0))
        assert wire.header(b"x-gateway-explain")
        assert len(scene.sent) == 2
        await scene.check_that_nothing_is_left()

    run(main())


def test_without_either_setting_everything_is_sent() -> None:
    async def main() -> None:
        scene = Scene(cache=True)
        assert scene.reuse is None
        wires = await scene.ask_all("a", "a")
        assert scene.sizes == [2]
        assert wires[0].header(b"x-gateway-reused-inputs") is None
        off = Scene(cache_bytes=MUCH, cache=False)
        for _ in range(2):
            await off.ask("a")
        assert len(off.sent) == 2
        facts: Facts = off.backend("a").facts
        assert facts.models

    run(main())
