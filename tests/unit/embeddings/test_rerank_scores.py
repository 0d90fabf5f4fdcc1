"""Answers to pieces are checked, and put together to what one engine would have answered."""

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import WrongAnswer
from gateway.features.embeddings.inputs import Pairs
from gateway.features.embeddings.wire import pairs_body, pairs_of, read_scores, score_pieces, tokens_in
from tests.unit.embeddings import rerank_engine as engine


def of(body: dict[str, Any]) -> Pairs:
    pairs = pairs_of("rerank" if "query" in body else "score", body, "m")
    assert pairs is not None
    return pairs


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[range]]:
    """A number of documents, and pieces of them."""
    count = draw(st.integers(1, 150))
    edges = sorted({0, count, *draw(st.lists(st.integers(1, count), max_size=8))})
    return count, [range(start, stop) for start, stop in pairwise(edges)]


@given(cuts(), st.sampled_from([None, 0, 1, 3, 10, 150, 1000]), st.sampled_from(["rerank", "shared", "paired"]))
def test_any_cut_comes_to_the_direct_answer(cut: tuple[int, list[range]], top_n: int | None, shape: str) -> None:
    count, parts = cut
    documents = [f"document {number % 20}" for number in range(count)]
    body: dict[str, Any] = {"query": "q", "documents": documents} | ({} if top_n is None else {"top_n": top_n})
    if shape != "rerank":
        body = {"text_1": "q" if shape == "shared" else [f"q{n % 3}" for n in range(count)], "text_2": documents}
    pairs = of(body)
    answers = [engine.answer(orjson.loads(pairs_body(pairs, part)), "piece", "cross")[1] for part in parts]
    scores = [read_scores(answer, pairs, part) for answer, part in zip(answers, parts, strict=True)]
    whole = b"".join(score_pieces("name", pairs, scores, sum(part.prompt_tokens for part in scores)))
    direct = orjson.loads(engine.answer(body, "name", "cross")[1])
    assert orjson.loads(whole) == direct
    assert list(orjson.loads(whole)) == list(direct)


def rerank_answer(*indices: Any, **changes: Any) -> bytes:
    results = [{"index": index, "relevance_score": 0.5 - place / 10} for place, index in enumerate(indices)]
    return orjson.dumps({"id": "x", "results": results, "usage": {"prompt_tokens": 3}} | changes)


TWO = of({"query": "q", "documents": ["a", "b"]})


def test_positions_become_those_of_the_client() -> None:
    pairs = of({"query": "q", "documents": ["a", "b", "c"]})
    assert [entry["index"] for entry in read_scores(rerank_answer(1, 0), pairs, range(1, 3)).entries] == [2, 1]


def test_equals_are_in_the_order_of_the_documents_however_a_backend_sorts() -> None:
    results = [{"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.5}]
    assert [each["index"] for each in read_scores(rerank_answer(results=results), TWO, range(2)).entries] == [0, 1]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        rerank_answer(results=None),
        rerank_answer(0),
        rerank_answer(0, 1, 2),
        rerank_answer(0, 0),
        rerank_answer(0, 2),
        rerank_answer(0, -1),
        rerank_answer(0, True),
        rerank_answer(0, None),
        rerank_answer(results=[0, 1]),
        rerank_answer(results=[{"index": 0, "relevance_score": 1}, {"index": 1}]),
        rerank_answer(results=[{"index": 0, "relevance_score": 1}, {"index": 1, "relevance_score": "1"}]),
        rerank_answer(results=[{"index": 0, "relevance_score": 1}, {"index": 1, "relevance_score": None}]),
        rerank_answer(results=[{"index": 0, "relevance_score": 1}, {"index": 1, "relevance_score": True}]),
        rerank_answer(0, 1).replace(b"0.5", b"1e999"),
        rerank_answer(0, 1, usage={}),
        rerank_answer(0, 1, usage=None),
        rerank_answer(0, 1, usage={"prompt_tokens": -1}),
    ],
)  # fmt: skip
def test_an_answer_to_something_else_is_not_taken(body: bytes) -> None:
    with pytest.raises(WrongAnswer):
        read_scores(body, TWO, range(2))


def test_a_piece_answers_as_many_as_were_asked_for() -> None:
    pairs = of({"query": "q", "documents": ["a", "b", "c"], "top_n": 1})
    assert len(read_scores(rerank_answer(1), pairs, range(2)).entries) == 1
    with pytest.raises(WrongAnswer):
        read_scores(rerank_answer(1, 0), pairs, range(2))


@pytest.mark.parametrize("body", [b"{", b"{}", b"[]", b'{"usage": {}}'])
def test_an_answer_without_tokens_is_refused(body: bytes) -> None:
    with pytest.raises(WrongAnswer):
        tokens_in(body)


def test_long_answers_are_written_in_pieces() -> None:
    body = {"query": "q", "documents": ["some text"] * 1000}
    scores = read_scores(engine.answer(body, "x", "bi")[1], of(body), range(1000))
    written = list(score_pieces("x", of(body), [scores], 1))
    assert len(written) > 10
    assert len(orjson.loads(b"".join(written))["results"]) == 1000
