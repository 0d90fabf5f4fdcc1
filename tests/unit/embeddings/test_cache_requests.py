"""Cached inputs are not sent again, and an answer from the cache equals that of a backend."""

import asyncio
from base64 import b64encode
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from gateway.backends.facts import Facts, ModelCard
from gateway.backends.health import ProbeResult
from gateway.errors import BackendFault
from gateway.observe.record import Record
from gateway.request import UpstreamResult
from tests.unit.embeddings.scene import BAD, Scene, answer, expected, tokens, vectors_in
from tests.unit.front.wires import FakeWire, reply_on
from tests.unit.scheduling.virtual_time import run, turns

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
def test_usage_is_reported_as_the_backend_would_and_as_exact_only_where_it_is(given: Any) -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        for _ in range(2):
            wire = await scene.ask(given)
            assert document_in(wire)["usage"]["prompt_tokens"] == document_in(wire)["usage"]["total_tokens"]
            if wire.header(b"x-gateway-usage") == b"exact":
                assert document_in(wire)["usage"]["prompt_tokens"] == sum(map(tokens, given))
        exact = wire.header(b"x-gateway-usage") == b"exact"
        assert exact == isinstance(given[0], list)  # of texts in a list, only the sum was reported
        await scene.check_that_nothing_is_left()

    run(main())


def test_tokens_that_were_reported_of_a_text_alone_stay_exact() -> None:
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


def test_inputs_are_computed_each_until_the_first_is_answered() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        wires = await scene.ask_all(["two words"] * 2, "two words")
        assert scene.sizes == [3]
        assert [vectors_in(wire) for wire in wires] == [expected(["two words"]) * 2, expected(["two words"])]
        assert sources(scene) == {"computed": 3}
        assert [record.reused_inputs for record in scene.records] == [0, 0]
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_long_list_is_kept_piece_by_piece_and_answered_in_its_order() -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64, cache_bytes=MUCH)
        texts: list[Any] = [f"text {number}" for number in range(300)]
        await scene.ask(texts[:100])
        sent = len(scene.sent)
        wire = await scene.ask(texts[::-1])
        assert sum(scene.sizes) == 300
        assert len(scene.sent) > sent + 1
        assert vectors_in(wire) == expected(texts[::-1])
        assert document_in(wire)["usage"]["prompt_tokens"] == 4 * 300
        again = await scene.ask(texts)
        assert sum(scene.sizes) == 300
        assert vectors_in(again) == expected(texts)
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("after", range(12))
def test_a_client_may_leave_at_any_moment(after: int) -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64, cache_bytes=MUCH)
        await scene.ask("known")
        first = asyncio.create_task(scene.ask(["known", "same", *(f"text {number}" for number in range(150))]))
        other = asyncio.create_task(scene.ask(["same", "known"]))
        await turns(after)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert vectors_in(await other) == expected(["same", "known"])
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_bad_input_fails_each_request_for_it_in_the_engines_own_words_and_no_other() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        await scene.ask("good")
        good, mixed, bad, two = await scene.ask_all("good", ["good", BAD], BAD, [BAD, BAD])
        assert vectors_in(good) == expected(["good"])
        for wire, given in ((mixed, ["good", BAD]), (bad, [BAD]), (two, [BAD, BAD])):
            assert wire.status == 400
            assert document_in(wire)["error"]["message"] == f"{given.count(BAD)} of {len(given)}"
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_refusal_is_about_the_whole_list_of_which_a_part_was_cached() -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64, cache_bytes=MUCH)
        await scene.ask("good")
        for more in ([], [f"text {number}" for number in range(100)]):
            given: list[Any] = ["good", BAD, *more]
            wire = await scene.ask(given)
            assert document_in(wire)["error"]["message"] == f"1 of {len(given)}"
            assert wire.header(b"x-gateway-reused-inputs") is None
            assert scene.records[-1].reused_inputs is None
            assert scene.sent[-1].items == given
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_refusal_is_passed_on_and_not_kept() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        for sent in (1, 2):
            assert (await scene.ask(BAD)).status == 400
            assert len(scene.sent) == sent
        await scene.check_that_nothing_is_left()

    run(main())


def test_failures_are_not_kept_and_the_backends_words_reach_only_the_client_whose_inputs_they_are_about() -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)

        def broken(_backend: str, _items: object) -> BackendFault:
            error = BackendFault("broken")
            error.answer = UpstreamResult(500, None, None, body=b"about secret", content_type=b"application/json")
            return error

        scene.fault = broken
        one, other = await scene.ask_all(["a", "secret"], "a")
        assert [wire.status for wire in (one, other)] == [502, 502]
        assert b"secret" not in one.body + other.body
        scene.fault = lambda _backend, _items: None
        assert vectors_in(await scene.ask("a")) == expected(["a"])
        scene.fault = broken
        rest = await scene.ask(["a", "more"])
        assert (rest.status, rest.body) == (500, b"about secret")
        assert scene.sent[-1].items == ["more"]
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("which", ["dimensions", "cache_salt", "ids", "class"])
def test_only_what_must_have_the_same_vector_is_found(which: str) -> None:
    async def main() -> None:
        scene = Scene(cache_bytes=MUCH)
        asks: list[tuple[Any, dict[str, Any]]] = {
            "dimensions": [("a", {"fields": {"dimensions": size}}) for size in (4, 8)],
            "cache_salt": [("a", {"fields": {"cache_salt": salt}}) for salt in (None, "x", "y")],
            "ids": [("0", {}), ("0\0\0\0", {}), ([48], {}), ([0x30, 0], {})],
            "class": [("a", {}), ("a", {"batch": True})],
        }[which]
        for _ in range(2):
            for given, options in asks:
                await scene.ask(given, **options)
        assert sum(scene.sizes) == (1 if which == "class" else len(asks))  # the second time from memory
        await scene.check_that_nothing_is_left()

    run(main())


def test_what_a_model_made_before_a_restart_is_forgotten_and_what_is_under_way_is_not_kept() -> None:
    async def main() -> None:
        scene = Scene("ab", cache_bytes=MUCH)
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
            scene.fleet.probed(backend, ProbeResult.REFUSED)
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
        assert 2000 < scene.cache.used_bytes <= 4000
        assert scene.counted.evictions.values[()] > 10
        assert "bytes" in repr(scene.cache)

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
        scene = Scene(cache_bytes=MUCH)
        await scene.ask("a", tenant="ann")
        request = scene.request("a")
        request.explains = True
        wire = FakeWire()
        await scene.coalescer.dispatch(request, reply_on(wire), Record("id", "embeddings", 0.0))
        assert wire.header(b"x-gateway-explain")
        assert len(scene.sent) == 2
        await scene.check_that_nothing_is_left()

    run(main())


def test_without_a_cache_everything_is_sent() -> None:
    async def main() -> None:
        scene = Scene(cache=True)
        assert not scene.cache.is_on("m")
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
