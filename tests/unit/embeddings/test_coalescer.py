"""Clients ask at the same time; engines see few requests, and each client gets what it would have got alone."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from gateway.core.errors import BackendFault, ConnectFailed, FreshConnectionClosed
from gateway.core.observe.record import Record
from gateway.core.request import UpstreamResult
from tests.unit.embeddings.scene import BAD, Scene, answer, expected, refusal, vectors_in
from tests.unit.front.wires import FakeWire, reply_on
from tests.unit.scheduling.virtual_time import run, turns


def test_a_lone_request_goes_at_once_and_as_it_came() -> None:
    async def main() -> None:
        scene = Scene()
        started = scene.clock()
        wire = await scene.ask("a text", "my-id")
        assert scene.sent[0].at == started
        assert scene.sent[0].request.body == b'{"model":"m","input":"a text","encoding_format":"base64"}'
        assert wire.body == answer("my-id", ["a text"], floats=False)
        assert wire.header(b"x-gateway-backend") == b"a"
        assert wire.header(b"x-gateway-usage") == b"exact"
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("encoding", ["float", None])
def test_floats_are_those_that_the_engine_would_have_written(encoding: str | None) -> None:
    async def main() -> None:
        scene = Scene()
        wire = await scene.ask("a text", "my-id", encoding=encoding)
        assert scene.sent[0].body["encoding_format"] == "base64"
        assert orjson.loads(wire.body) == orjson.loads(answer("my-id", ["a text"], floats=True))
        assert wire.header(b"x-gateway-usage") == b"exact"
        await scene.check_that_nothing_is_left()

    run(main())


def test_requests_that_come_together_are_sent_together() -> None:
    async def main() -> None:
        scene = Scene()
        texts = [f"text {number}" for number in range(40)]
        wires = await scene.ask_all(*texts)
        assert scene.sizes == [40]
        for number, (wire, text) in enumerate(zip(wires, texts, strict=True)):
            assert vectors_in(wire) == expected([text])
            assert orjson.loads(wire.body)["id"] == f"embd-id-{number}"
            assert wire.header(b"x-gateway-usage") == b"estimated"
        usages = [orjson.loads(wire.body)["usage"] for wire in wires]
        assert sum(usage["prompt_tokens"] for usage in usages) == 4 * 40
        assert all(usage["total_tokens"] == usage["prompt_tokens"] for usage in usages)
        assert scene.sent[0].request.demand.sequences == 40
        assert {record.backend for record in scene.records} == {"a"}
        assert [record.attempts for record in scene.records] == [1] * 40
        await scene.check_that_nothing_is_left()

    run(main())


def test_what_comes_while_batches_are_under_way_gathers_until_one_of_them_ends() -> None:
    async def main() -> None:
        scene = Scene(max_delay_seconds=1.0)
        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(scene.ask(f"text {number}"))
                await asyncio.sleep(0.0005)
        assert scene.sizes[:2] == [1, 1]
        assert len(scene.sizes) <= 5
        flushes = {labels[1]: count for labels, count in scene.counted.flushes.values.items()}
        assert flushes["idle"] == 1
        assert "delay" not in flushes
        await scene.check_that_nothing_is_left()

    run(main())


def test_no_batch_gathers_for_longer_than_the_delay_allows() -> None:
    async def main() -> None:
        scene = Scene(max_delay_seconds=0.005)
        scene.overhead_seconds = 1.0
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(scene.ask(f"text {number}"))
                await asyncio.sleep(0.0001)
        started = scene.records[4].arrived_seconds
        assert scene.sent[4].at - started == pytest.approx(0.005, abs=1e-6)
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_full_batch_goes_at_once() -> None:
    async def main() -> None:
        scene = Scene(max_batch_items=8)
        await scene.ask_all(*(f"text {number}" for number in range(20)))
        assert scene.sizes == [8, 8, 4]
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_long_list_is_spread_over_all_replicas_and_put_together_again() -> None:
    async def main() -> None:
        scene = Scene("abcd", cap=64)
        texts = [f"text {number} " + "word " * (number % 7) for number in range(500)]
        wire = await scene.ask(texts, "my-id", encoding="float")
        assert vectors_in(wire) == expected(list(texts))
        assert wire.header(b"x-gateway-usage") == b"exact"
        assert set((wire.header(b"x-gateway-backend") or b"").split(b",")) == {b"a", b"b", b"c", b"d"}
        assert orjson.loads(wire.body)["usage"]["prompt_tokens"] == sum(2 + len(text.split()) for text in texts)
        assert {sent.backend for sent in scene.sent if sent.at == scene.sent[0].at} == {"a", "b", "c", "d"}
        assert max(scene.most_at_once.values()) <= 64
        names = [sent.request.request_id for sent in scene.sent]
        assert len(set(names)) == len(names)
        assert all(sent.request.headers.endswith(b"traceparent: t\r\n") for sent in scene.sent)
        assert scene.counted.splits.values == {("m",): 1}
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_piece_that_a_replica_fails_is_sent_to_another_alone() -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64)
        failed: list[str] = []

        def once(backend: str, items: list[Any]) -> FreshConnectionClosed | None:
            if failed:
                return None
            failed.append(backend)
            return FreshConnectionClosed("gone")

        scene.fault = once
        texts = [f"text {number}" for number in range(130)]
        wire = await scene.ask(texts)
        assert vectors_in(wire) == expected(list(texts))
        assert sum(scene.sizes) == 130 + scene.sizes[0]
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_list_with_a_bad_input_gets_the_refusal() -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64)
        wire = await scene.ask([*(f"text {number}" for number in range(200)), BAD])
        assert wire.status == 400
        assert b" of " in wire.body
        await asyncio.sleep(1)
        await scene.check_that_nothing_is_left()

    run(main())


def test_one_bad_input_among_64_clients_fails_alone_and_its_client_is_kept_apart_for_a_while() -> None:
    async def main() -> None:
        scene = Scene()
        texts = [f"text {number}" if number != 20 else BAD for number in range(64)]
        wires = [FakeWire() for _ in texts]
        await asyncio.gather(
            *(scene.ask(text, wire=wire, tenant=text) for text, wire in zip(texts, wires, strict=True))
        )
        assert len(scene.sizes) <= 1 + 6 + 1 + 1  # all; by halves; the rest; and the bad one alone
        assert scene.sizes[0] == 64
        for text, wire in zip(texts, wires, strict=True):
            if text == BAD:
                assert (wire.status, wire.body) == (400, refusal([BAD]))
            else:
                assert wire.status == 200
                assert vectors_in(wire) == expected([text])
        assert scene.counted.isolations.values == {("m",): 1}
        scene.sent.clear()
        await asyncio.gather(*(scene.ask(f"t{n}", tenant="other") for n in range(3)), scene.ask("good", tenant=BAD))
        assert sorted(scene.sizes) == [1, 3]
        await asyncio.sleep(11)
        scene.sent.clear()
        await asyncio.gather(*(scene.ask(f"t{n}", tenant="other") for n in range(3)), scene.ask("good", tenant=BAD))
        assert scene.sizes == [4]
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize(
    ("bad", "again"),
    [("192.0.2.7", "192.0.2.7"), ("2001:db8::1", "2001:db8::ffff:1"), ("::ffff:192.0.2.7", "192.0.2.7")],
)
def test_clients_without_a_name_are_distinguished_by_their_addresses(bad: str, again: str) -> None:
    async def main() -> None:
        scene = Scene()
        await asyncio.gather(scene.ask(BAD, wire=FakeWire(address=bad)), scene.ask("good"))
        scene.sent.clear()
        await asyncio.gather(scene.ask("x", wire=FakeWire(address=again)), scene.ask("y"), scene.ask("z"))
        assert sorted(scene.sizes) == [1, 2]

    run(main())


def test_quarantine_share_batches_with_each_other() -> None:
    async def main() -> None:
        scene = Scene()
        await asyncio.gather(scene.ask(BAD, wire=FakeWire(address="192.0.2.9")), scene.ask("x"))
        scene.sent.clear()
        later = (scene.ask(f"text {n}", wire=FakeWire(address="192.0.2.9")) for n in range(24))
        await asyncio.gather(*later, *(scene.ask(f"other {n}", wire=FakeWire(address="192.0.2.8")) for n in range(8)))
        assert sorted(scene.sizes) == [8, 24]

    run(main())


@pytest.mark.parametrize("error", [BackendFault("broken"), FreshConnectionClosed("gone"), ConnectFailed("no")])
def test_a_failure_that_cannot_be_tried_again_is_everybodys(error: Any) -> None:
    async def main() -> None:
        scene = Scene(admission={"hold_without_backend": False})
        scene.dispatcher._holds = False
        error.answer = UpstreamResult(500, None, None, body=b"inputs of others", content_type=b"text/plain")
        scene.fault = lambda _backend, _items: error
        wires = await scene.ask_all("a", "b", "c")
        assert [wire.status for wire in wires] == [502] * 3
        assert all(b"others" not in wire.body for wire in wires)
        assert len({id(record) for record in scene.records if record.error}) == 3
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("cut", ["missing", "twice", "json", "number", "usage"])
def test_an_answer_that_does_not_match_is_nobodys(cut: str) -> None:
    async def main() -> None:
        scene = Scene()

        def wrong(backend: str, items: list[Any]) -> bytes:
            document = orjson.loads(answer("x", items, floats=False))
            if cut == "missing":
                document["data"].pop()
            elif cut == "twice":
                document["data"][1]["index"] = 0
            elif cut == "number":
                document["data"][1]["index"] = len(items)
            elif cut == "usage":
                document["usage"] = None
            return b"{" if cut == "json" else orjson.dumps(document)

        scene.fault = wrong
        wires = await scene.ask_all("a", "b", "c")
        assert [wire.status for wire in wires] == [502] * 3
        assert all(b"wrong_backend_answer" in wire.body for wire in wires)
        await scene.check_that_nothing_is_left()

    run(main())


def test_answers_are_mapped_by_index_and_not_by_place() -> None:
    async def main() -> None:
        scene = Scene()

        def shuffled(backend: str, items: list[Any]) -> bytes:
            document = orjson.loads(answer("x", items, floats=False))
            document["data"].reverse()
            return orjson.dumps(document)

        scene.fault = shuffled
        texts = ["a", "b", "c", "d"]
        for text, wire in zip(texts, await scene.ask_all(*texts), strict=True):
            assert vectors_in(wire) == expected([text])

    run(main())


def test_what_must_not_share_a_batch_does_not() -> None:
    async def main() -> None:
        scene = Scene()
        await asyncio.gather(
            scene.ask("text"), scene.ask([1, 2, 3]), scene.ask("isolated", fields={"cache_salt": "ann"}, tenant="ann"),
            scene.ask("later", batch=True), scene.ask(["two", "more"]), scene.ask([[4], [5, 6]]),
        )  # fmt: skip
        assert sorted(scene.sizes) == [1, 1, 3, 3]

    run(main())


def test_token_ids_are_counted_exactly() -> None:
    async def main() -> None:
        scene = Scene()
        wires = await scene.ask_all([1, 2, 3], [[4], [5, 6]])
        assert [orjson.loads(wire.body)["usage"]["prompt_tokens"] for wire in wires] == [3, 3]
        assert {wire.header(b"x-gateway-usage") for wire in wires} == {b"exact"}

    run(main())


def test_a_text_that_may_be_too_long_endangers_no_other() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.ask_all("a", "b", "word " * 250)
        assert sorted(scene.sizes) == [1, 2]

    run(main())


def test_short_requests_do_not_wait_behind_a_long_list() -> None:
    async def main() -> None:
        scene = Scene(cap=64)
        scene.overhead_seconds = 0.1
        bulk = asyncio.get_running_loop().create_task(scene.ask([f"text {number}" for number in range(2048)]))
        await asyncio.sleep(0.001)
        assert sum(scene.sizes) <= 48
        started = scene.clock()
        await scene.ask("short")
        assert scene.clock() - started < 0.11
        assert not bulk.done()
        await bulk
        assert scene.most_at_once["a"] <= 64
        await scene.check_that_nothing_is_left()

    run(main())


def test_one_tenants_flood_does_not_keep_another_from_the_next_batch() -> None:
    async def main() -> None:
        scene = Scene(max_batch_items=8, max_delay_seconds=1.0)
        flood = [asyncio.create_task(scene.ask(f"flood {n}", tenant="much")) for n in range(64)]
        little = [asyncio.create_task(scene.ask(f"little {n}", tenant="little")) for n in range(2)]
        await asyncio.gather(*flood, *little)
        first = [str(item) for sent in scene.sent[:2] for item in sent.items]
        assert sum("little" in item for item in first) == 2

    run(main())


def test_a_request_that_leaves_while_it_waits_is_not_sent() -> None:
    async def main() -> None:
        scene = Scene(max_delay_seconds=1.0)
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(scene.ask(f"text {number}")))
            await turns(4)
        tasks += [asyncio.create_task(scene.ask(f"late {number}")) for number in range(3)]
        await turns(4)
        tasks[5].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        sent = [str(item) for each in scene.sent for item in each.items]
        assert "late 1" not in sent
        assert "late 2" in sent
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_batch_is_aborted_only_when_all_its_clients_have_left() -> None:
    async def main() -> None:
        scene = Scene()
        tasks = [asyncio.create_task(scene.ask(f"text {number}")) for number in range(3)]
        await turns(6)
        assert scene.sizes == [3]
        tasks[0].cancel()
        tasks[1].cancel()
        await turns(3)
        assert not scene.sent[0].aborted
        tasks[2].cancel()
        await turns(3)
        assert scene.sent[0].aborted
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("given", ["one text", [f"text {number}" for number in range(150)]])
@pytest.mark.parametrize("after", range(12))
def test_a_client_may_leave_at_any_moment(after: int, given: Any) -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64)
        others = [asyncio.create_task(scene.ask(f"other {number}")) for number in range(3)]
        leaver = asyncio.create_task(scene.ask(given, encoding="float"))
        await turns(after)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        for number, other in enumerate(others):
            assert vectors_in(await other) == expected([f"other {number}"])
        await turns(5)
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_client_is_refused_when_too_many_wait_already_but_those_under_way_do_not_count() -> None:
    async def main() -> None:
        scene = Scene(admission={"max_queued_requests": 4}, max_delay_seconds=10.0)
        tasks = []
        for number in range(20):
            tasks.append(asyncio.create_task(scene.ask(f"text {number}")))
            await turns(4)  # the first four go at once, each alone
        wires = await asyncio.gather(*tasks)
        assert [wire.status for wire in wires] == [200] * 8 + [429] * 12
        assert scene.sizes == [1, 1, 1, 1, 4]
        assert b"queue_full" in wires[-1].body
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_client_waits_no_longer_than_its_deadline() -> None:
    async def main() -> None:
        scene = Scene(max_delay_seconds=10.0)
        scene.overhead_seconds = 5.0
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(scene.ask(f"text {number}")))
            await turns(4)
        started = scene.clock()
        wire = await scene.ask("hurried", deadline_seconds=started + 0.5)
        assert scene.clock() - started == pytest.approx(0.5)
        assert wire.status == 429
        assert b"deadline_exceeded" in wire.body
        await asyncio.gather(*tasks)
        assert "hurried" not in [item for sent in scene.sent for item in sent.items]
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_list_whose_first_piece_is_sent_in_time_is_not_given_up() -> None:
    async def main() -> None:
        scene = Scene(cap=8, admission={"max_wait_seconds": 0.5})
        scene.overhead_seconds = 0.2
        texts = [f"text {number}" for number in range(40)]
        long = asyncio.create_task(scene.ask(texts))
        await turns(4)
        late = await scene.ask([f"late {number}" for number in range(9)], deadline_seconds=scene.clock() + 0.1)
        assert (late.status, b"deadline_exceeded" in late.body) == (429, True)
        assert vectors_in(await long) == expected(list(texts))
        await scene.check_that_nothing_is_left()

    run(main())


def test_requests_that_want_an_explanation_or_have_no_backend_go_their_usual_way() -> None:
    async def main() -> None:
        scene = Scene()
        request = scene.request("a")
        request.explains = True
        wire = FakeWire()
        await scene.coalescer.dispatch(request, reply_on(wire), Record("id", "embeddings", 0.0))
        assert wire.header(b"x-gateway-explain")
        unknown = replace(request, demand=replace(request.demand, model="absent"))
        with pytest.raises(Exception, match="absent"):
            await scene.coalescer.dispatch(unknown, reply_on(FakeWire()), Record("id", "embeddings", 0.0))

    run(main())


def test_at_the_end_what_is_under_way_is_given_up() -> None:
    async def main() -> None:
        scene = Scene()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(scene.batcher.stop)
            tasks = [asyncio.create_task(scene.ask(f"text {number}")) for number in range(3)]
            await turns(6)
        wires = await asyncio.gather(*tasks)
        assert [wire.status for wire in wires] == [503] * 3
        assert scene.sent[0].aborted
        await turns(3)
        await scene.check_that_nothing_is_left()

    run(main())


def test_floats_and_base64_in_one_batch_are_the_same_vectors() -> None:
    async def main() -> None:
        scene = Scene()
        first, second = await asyncio.gather(scene.ask("same"), scene.ask("same", encoding="float"))
        assert scene.sizes == [2]
        assert vectors_in(first) == vectors_in(second) == expected(["same"])
        floats = orjson.loads(second.body)["data"][0]["embedding"]
        assert np.array(floats, "<f4").astype(np.float64).tolist() == floats

    run(main())
