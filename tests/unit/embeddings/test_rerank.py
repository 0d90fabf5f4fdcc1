"""Long lists of documents are scored by all replicas at once, and answered as one engine would answer."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import BackendError, BackendFault, FreshConnectionClosed, ReusedConnectionClosed
from gateway.core.observe.record import Record
from tests.unit.batches.offline_hall import a_line
from tests.unit.embeddings import rerank_engine as engine
from tests.unit.embeddings.rerank_engine import BAD
from tests.unit.embeddings.rerank_scene import Scene, Sent, texts
from tests.unit.front.wires import FakeWire, reply_on
from tests.unit.scheduling.virtual_time import run, turns

QUERY = "what is it"


def check(wire: FakeWire, scene: Scene, body: dict[str, Any], name: str = "id-1") -> None:
    """The client got what one engine would have answered."""
    assert wire.status == 200, wire.body
    assert orjson.loads(wire.body) == scene.direct(body, name)


@pytest.mark.parametrize("kind", ["cross", "bi"])
@pytest.mark.parametrize("top_n", [None, 0, 3, 200, 1000])
def test_a_long_list_is_ranked_by_all_replicas(kind: str, top_n: int | None) -> None:
    async def main() -> None:
        scene = Scene("ab", kind=kind)
        body = {"query": QUERY, "documents": texts(200)} | ({} if top_n is None else {"top_n": top_n})
        wire = await scene.ask("rerank", body)
        check(wire, scene, body)
        assert {sent.backend for sent in scene.pieces} == {"a", "b"}
        assert sum(len(sent.documents) for sent in scene.pieces) == 200
        assert all(sent.request.demand.prompt_tokens > len(sent.documents) for sent in scene.pieces)
        assert max(len(sent.documents) for sent in scene.pieces) <= 64
        assert {sent.body.get("top_n") for sent in scene.pieces} == {3 if top_n == 3 else None}
        assert wire.header(b"x-gateway-usage") == b"exact"
        assert sorted((wire.header(b"x-gateway-backend") or b"").split(b",")) == [b"a", b"b"]
        assert scene.below.counted.splits.values == {("m",): 1}
        assert scene.records[0].attempts == 1
        assert scene.records[0].prompt_tokens == scene.direct(body)["usage"]["prompt_tokens"]
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("kind", ["cross", "bi"])
@pytest.mark.parametrize("shape", ["one", "list of one", "each its own"])
def test_a_long_list_is_scored_in_its_order(kind: str, shape: str) -> None:
    async def main() -> None:
        scene = Scene("ab", kind=kind)
        documents = texts(130)
        queries: Any = {"one": QUERY, "list of one": [QUERY], "each its own": [f"q {n}" for n in range(130)]}[shape]
        body = {"text_1": queries, "text_2": documents}
        check(await scene.ask("score", body), scene, body)
        assert len(scene.pieces) > 1
        measured = [sent for sent in scene.sent if sent.request.request_id.endswith("-query")]
        assert len(measured) == (kind == "bi" and shape != "each its own")
        await scene.check_that_nothing_is_left()

    run(main())


def test_pieces_are_at_the_backends_at_the_same_time() -> None:
    async def main() -> None:
        scene = Scene("ab")
        await scene.rerank(texts(256))
        started = {sent.at for sent in scene.pieces}
        assert len(scene.pieces) == 4
        assert max(started) - min(started) < 0.001
        assert {sent.request.request_id for sent in scene.pieces} == {"id-1-0", "id-1-64", "id-1-128", "id-1-192"}
        assert b"x-request-id: id-1-64\r\ntraceparent: t\r\n" in {sent.request.headers for sent in scene.pieces}

    run(main())


def test_a_short_list_and_one_that_wants_reasons_go_as_they_came() -> None:
    async def main() -> None:
        scene = Scene("ab")
        wire = await scene.rerank(texts(64))
        assert [sent.body["documents"] for sent in scene.sent] == [texts(64)]
        assert wire.header(b"x-gateway-usage") is None
        request = scene.request("rerank", {"query": QUERY, "documents": texts(200)})
        request.explains = True
        await scene.rerank_splitter.dispatch(request, reply_on(FakeWire()), Record("x", "rerank", scene.clock()))
        assert len(scene.sent) == 2

    run(main())


def test_a_model_that_ranks_all_documents_together_gets_them_together() -> None:
    async def main() -> None:
        scene = Scene("ab", kind="listwise")
        for _ in range(2):
            wire = await scene.rerank(texts(200))
            check(wire, scene, {"query": QUERY, "documents": texts(200)})
        assert not scene.pieces or all(len(sent.documents) == 200 for sent in scene.pieces)
        assert len([sent for sent in scene.sent if sent.is_probe]) == 2  # and it is not asked again
        scene.rerank_splitter.forget()
        await scene.rerank(texts(200))
        assert len([sent for sent in scene.sent if sent.is_probe]) == 4
        await scene.check_that_nothing_is_left()

    run(main())


def test_while_a_model_does_not_say_how_it_counts_lists_go_whole() -> None:
    async def main() -> None:
        scene = Scene("ab")
        scene.fault = lambda _, sent: BackendFault("no") if sent.is_probe else None
        wires = await asyncio.gather(*(scene.rerank(texts(200), f"id-{number}") for number in range(5)))
        assert [wire.status for wire in wires] == [200] * 5
        assert {len(sent.documents) for sent in scene.sent if not sent.is_probe} == {200}
        assert all(sent.request.request_id.startswith("id-0") for sent in scene.sent if sent.is_probe)
        scene.fault = lambda *_: None
        await scene.rerank(texts(200), "later")
        assert len(scene.pieces) > 1
        await scene.check_that_nothing_is_left()

    run(main())


def test_lists_that_come_together_ask_once_how_the_model_counts() -> None:
    async def main() -> None:
        scene = Scene("ab", kind="bi")
        await asyncio.gather(*(scene.rerank(texts(200), f"id-{number}") for number in range(5)))
        assert len([sent for sent in scene.sent if sent.is_probe]) == 2
        await scene.check_that_nothing_is_left()

    run(main())


def test_when_the_client_leaves_whose_list_began_the_probes_the_others_go_whole() -> None:
    async def main() -> None:
        scene = Scene("ab")
        tasks = [asyncio.get_running_loop().create_task(scene.rerank(texts(200), f"id-{n}")) for n in range(3)]
        await turns(3)
        tasks[1].cancel()
        await turns(3)
        tasks[0].cancel()
        await asyncio.wait(tasks)
        assert tasks[2].result().status == 200
        assert {len(sent.documents) for sent in scene.sent if not sent.is_probe} == {200}
        await scene.rerank(texts(200), "later")
        assert len(scene.pieces) > 1
        await scene.check_that_nothing_is_left()

    run(main())


def test_what_a_backend_refuses_is_asked_whole_so_that_the_client_hears_its_own_error() -> None:
    async def main() -> None:
        scene = Scene("ab")
        wire = await scene.rerank([*texts(199), BAD])
        assert wire.status == 400
        assert orjson.loads(wire.body)["error"]["message"] == "bad among 200"
        assert scene.records[0].attempts == 1
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_piece_whose_backend_dies_is_answered_by_another() -> None:
    async def main() -> None:
        scene = Scene("ab")
        died: list[str] = []

        def dies(backend: str, sent: Sent) -> BackendError | None:
            if sent.is_piece and backend == "a" and not died:
                died.append(backend)
                return FreshConnectionClosed("died")
            return None

        scene.fault = dies
        wire = await scene.rerank(texts(200))
        check(wire, scene, {"query": QUERY, "documents": texts(200)})
        assert died
        assert scene.records[0].attempts == 2
        await scene.check_that_nothing_is_left()

    run(main())


def test_when_a_piece_fails_finally_the_others_are_aborted_at_once() -> None:
    async def main() -> None:
        scene = Scene("ab")
        scene.overhead_seconds = 1.0

        def fails(_: str, sent: Sent) -> BackendError | None:
            return BackendFault("no more") if sent.request.request_id == "id-1-192" else None

        await scene.rerank(texts(200), "first")
        scene.fault, scene.document_seconds = fails, 0.1
        started, scene.sent = scene.clock(), []
        wire = await scene.rerank(texts(256))
        assert wire.status == 502
        assert b"no more" in wire.body
        assert scene.clock() - started < 8.0
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("spoil", [lambda body: body.replace(b'"index":0,', b'"index":1,'), lambda body: body[:-1]])
def test_an_answer_to_something_else_is_an_error(spoil: Callable[[bytes], bytes]) -> None:
    async def main() -> None:
        scene = Scene("ab")

        def wrong(_: str, sent: Sent) -> bytes | None:
            answer = engine.answer(sent.body, sent.request.request_id, "cross")[1]
            return spoil(answer) if sent.request.request_id == "id-1-50" else None

        scene.fault = wrong
        wire = await scene.rerank(texts(200))
        assert wire.status == 502
        assert orjson.loads(wire.body)["error"]["code"] == "wrong_backend_answer"
        await scene.check_that_nothing_is_left()

    run(main())


@pytest.mark.parametrize("after_ms", [0, 1, 5, 15, 40, 100])
def test_a_client_that_leaves_takes_all_its_pieces_with_it(after_ms: int) -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64)
        task = asyncio.get_running_loop().create_task(scene.rerank(texts(500)))
        await asyncio.sleep(after_ms / 1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = len(scene.sent)
        assert scene.records[0].attempts == (len(scene.pieces) > 0)
        await scene.check_that_nothing_is_left()
        assert len(scene.sent) == before
        assert scene.in_flight == 0

    run(main())


def test_short_requests_find_slots_while_long_lists_are_scored() -> None:
    async def main() -> None:
        scene = Scene("ab", cap=32)
        long = asyncio.get_running_loop().create_task(scene.rerank(texts(2000), "long"))
        await asyncio.sleep(0.1)
        started = scene.clock()
        await scene.rerank(texts(4), "short")
        assert scene.clock() - started < 0.02
        assert scene.most_in_flight <= 48 + 4
        assert not long.done()
        check(await long, scene, {"query": QUERY, "documents": texts(2000)}, "long")
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_list_whose_first_piece_gets_no_slots_in_time_is_refused_with_a_retry_after() -> None:
    async def main() -> None:
        scene = Scene("a", cap=8, admission={"max_wait_seconds": 0.5})
        await scene.rerank(texts(16), "first")
        scene.overhead_seconds = 1.0
        long = asyncio.get_running_loop().create_task(scene.rerank(texts(40), "long"))
        await asyncio.sleep(0.01)
        late = await scene.rerank(texts(16), "late")
        assert late.status == 429
        assert late.header(b"retry-after-ms")
        assert (await long).status == 200
        scene.overhead_seconds = 0.01
        assert (await scene.rerank(texts(16), "later")).status == 200
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_list_is_not_given_up_because_its_own_pieces_are_in_its_way() -> None:
    async def main() -> None:
        scene = Scene("a", cap=64)
        await scene.rerank(texts(80), "first")
        scene.below.lease_broker.max_wait_seconds = 0.5
        scene.overhead_seconds = 0.2
        scene.below.fleet.engines()[0].resize(8, None)  # what a backend under load may be given
        scene.below.lease_broker.scan_soon()
        assert (await scene.rerank(texts(80))).status == 200
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_deadline_is_kept_while_a_list_waits() -> None:
    async def main() -> None:
        scene = Scene("a", cap=8)
        await scene.rerank(texts(16), "first")
        scene.overhead_seconds = 1.0
        long = asyncio.get_running_loop().create_task(scene.rerank(texts(40), "long"))
        await asyncio.sleep(0.01)
        started = scene.clock()
        body = {"query": QUERY, "documents": texts(16)}
        late = await scene.ask("rerank", body, "late", deadline_seconds=started + 0.25)
        assert (late.status, scene.clock() - started) == (429, pytest.approx(0.25))
        assert b"deadline_exceeded" in late.body
        await long
        await scene.check_that_nothing_is_left()

    run(main())


def test_no_more_lists_wait_than_may() -> None:
    async def main() -> None:
        scene = Scene("a", cap=8, admission={"max_queued_requests": 2})
        await scene.rerank(texts(16), "first")
        tasks = []
        for number in range(5):
            tasks.append(asyncio.get_running_loop().create_task(scene.rerank(texts(40), f"id-{number}")))
            await turns(10)
        wires = await asyncio.gather(*tasks)
        assert sorted(wire.status for wire in wires) == [200, 200, 429, 429, 429]
        await scene.check_that_nothing_is_left()

    run(main())


_FAULTS: tuple[Callable[[], BackendError] | None, ...] = (
    None, None, None, None, None, None, lambda: ReusedConnectionClosed("x"), lambda: FreshConnectionClosed("x"),
    lambda: BackendFault("x"),
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 60), st.integers(1, 300), st.sampled_from([0, 1, 7, 100, 500]), st.booleans(),
            st.none() | st.integers(0, 200),
        ),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.sampled_from(_FAULTS), max_size=40),
    st.sampled_from(["cross", "bi", "listwise"]),
    st.sampled_from([8, 33, 256]),
)  # fmt: skip
def test_whatever_happens_each_client_gets_its_own_answer_or_an_error(
    clients: list[tuple[int, int, int, bool, int | None]], faults: list[Any], kind: str, cap: int
) -> None:
    async def main() -> None:
        scene = Scene("ab", cap=cap, kind=kind)
        left = iter(faults)

        def fault(_: str, __: Sent) -> BackendError | None:
            made = next(left, None)
            return made() if made is not None else None

        scene.fault = fault

        async def one(number: int, after: int, count: int, top_n: int, bad: bool, leaves: int | None) -> None:
            await asyncio.sleep(after / 1000)
            documents = [f"client {number} " + text for text in texts(count)]
            if bad and number % 3 == 0:
                documents[-1] = BAD
            body = {"query": f"query of {number}", "documents": documents, "top_n": top_n}
            try:
                async with asyncio.timeout(None if leaves is None else leaves / 1000):
                    wire = await scene.ask("rerank", body, f"id-{number}")
            except TimeoutError:
                return
            if wire.status == 200:
                check(wire, scene, body, f"id-{number}")
            else:
                assert wire.status in (400, 502, 503)
                assert (wire.status == 400) == (BAD in documents) or faults

        await asyncio.gather(*(one(number, *client) for number, client in enumerate(clients)))
        await scene.check_that_nothing_is_left()

    run(main())


def test_probes_for_a_line_of_an_offline_batch_do_not_wait_for_idle_capacity() -> None:
    async def main() -> None:
        scene = Scene("ab")
        body = {"query": QUERY, "documents": texts(200)}
        check(await scene.ask("rerank", body, batch=True, offline=a_line()), scene, body)
        assert all(sent.request.demand.offline is None for sent in scene.sent if sent.is_probe)
        assert all(sent.request.demand.offline is not None for sent in scene.pieces)
        assert max(len(sent.documents) for sent in scene.pieces) <= 64
        await scene.check_that_nothing_is_left()

    run(main())
