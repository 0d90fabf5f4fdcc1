"""What a list may cost has bounds that its client does not choose: pieces, bytes to the backends, tasks."""

import asyncio
from typing import Any

import pytest

from tests.unit.embeddings.rerank_scene import Scene, texts
from tests.unit.scheduling.virtual_time import run

LONG = "word " * 200


def bytes_sent(scene: Scene) -> int:
    return sum(len(sent.request.body) for sent in scene.sent if not sent.is_probe)


@pytest.mark.parametrize(
    ("query", "documents", "fields"),
    [
        ("word " * 8000, texts(200), {}),  # each piece would hold one document, and the whole query
        (LONG, ["d"] * 900, {}),
        ("q", ["d"] * 900, {"instruction": LONG}),
        ("q", ["d"] * 900, {"chat_template_kwargs": {"text": LONG}}),
    ],
    ids=["a query that fills a piece", "a long query", "a long instruction", "long arguments"],
)
def test_no_list_is_cut_that_would_multiply_its_bytes(query: str, documents: list[str], fields: dict[str, Any]) -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64)
        body = {"query": query, "documents": documents, **fields}
        whole = len(scene.request("rerank", body).body)
        wire = await scene.ask("rerank", body)
        assert wire.status == 200
        assert [len(sent.documents) for sent in scene.sent] == [len(documents)]
        assert bytes_sent(scene) == whole

    run(main())


def test_a_list_is_cut_that_repeats_little() -> None:
    async def main() -> None:
        scene = Scene("ab", cap=64)
        body = {"query": LONG, "documents": [LONG] * 200}
        assert (await scene.ask("rerank", body)).status == 200
        assert len(scene.pieces) > 1
        assert bytes_sent(scene) < 2 * len(scene.request("rerank", body).body)

    run(main())


def test_a_list_of_more_pieces_than_may_be_goes_whole() -> None:
    async def main() -> None:
        scene = Scene("a", cap=8)
        await scene.rerank(texts(8 * 256))
        assert len(scene.pieces) == 256
        scene.sent.clear()
        await scene.rerank(texts(8 * 256 + 1))
        assert [len(sent.documents) for sent in scene.sent] == [8 * 256 + 1]

    run(main())


def test_only_pieces_under_way_have_tasks() -> None:
    async def main() -> None:
        scene = Scene("a", cap=32)
        await scene.rerank(texts(40), "first")
        long = asyncio.get_running_loop().create_task(scene.rerank(texts(2000)))
        await asyncio.sleep(0.005)
        assert scene.in_flight == 24
        assert len(asyncio.all_tasks()) < 10
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await scene.check_that_nothing_is_left()

    run(main())


def test_lists_of_inputs_and_lists_of_documents_keep_to_one_share_of_the_slots() -> None:
    async def main() -> None:
        scene = Scene("a", cap=64)
        await scene.rerank(texts(80), "first")
        loop, below = asyncio.get_running_loop(), scene.below
        below.overhead_seconds = scene.overhead_seconds = 0.05
        inputs = loop.create_task(below.ask([f"input {n}" for n in range(1000)]))
        documents = loop.create_task(scene.rerank(texts(1000), "long"))
        most = 0
        while not (inputs.done() or documents.done()):
            await asyncio.sleep(0.005)
            under_way = (below._running["a"], scene.in_flight)
            most = max(most, sum(under_way))
            assert sum(under_way) <= 48
        assert most == 48
        assert (await inputs).status == (await documents).status == 200
        await scene.check_that_nothing_is_left()

    run(main())


def test_what_engines_may_be_given_now_counts() -> None:
    async def main() -> None:
        scene = Scene("a", cap=32)
        await scene.rerank(texts(40), "first")
        scene.overhead_seconds = 0.1
        [engine] = scene.below.fleet.engines()
        long = asyncio.get_running_loop().create_task(scene.rerank(texts(2000)))
        for limit, under_way in ((32, 24), (8, 8), (24, 16)):
            engine.resize(limit, None)
            for listener in scene.below.fleet.on_limit:
                listener(scene.backend("a"), None)
            await asyncio.sleep(0.15)
            assert scene.in_flight == under_way
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await scene.check_that_nothing_is_left()

    run(main())


def test_tenants_take_turns() -> None:
    async def main() -> None:
        scene = Scene("a", cap=8)
        await scene.rerank(texts(16), "first")
        scene.sent.clear()
        body = {"query": "q", "documents": texts(80)}
        await asyncio.gather(*(scene.ask("rerank", body, f"{name}-list", tenant=name) for name in ("ann", "bob")))
        order = [sent.request.request_id[:3] for sent in scene.pieces]
        assert order == ["ann", "bob"] * 10
        await scene.check_that_nothing_is_left()

    run(main())
