"""Only what is known to act on each document by itself is cut; and pieces ask for what the whole would."""

from typing import Any

import orjson
import pytest

from gateway.core.routing.prompt_blocks import scored_bytes
from gateway.features.embeddings.inputs import Pairs
from gateway.features.embeddings.wire import (
    MOST_DOCUMENTS,
    pairs_body,
    pairs_of,
    query_body,
    wanted_of,
)

RERANK: dict[str, Any] = {"model": "alias", "query": "q", "documents": ["a", "bé", "c"]}
SCORE: dict[str, Any] = {"model": "alias", "text_1": ["q", "r", "s"], "text_2": ["a", "b", "c"]}


def understood(endpoint: str, document: dict[str, Any]) -> Pairs:
    pairs = pairs_of(endpoint, document, "m")
    assert pairs is not None
    return pairs


def test_pieces_of_a_rerank_request_repeat_all_but_the_documents() -> None:
    fields = {"max_tokens_per_doc": 9, "user": None, "return_documents": True, "instruction": "i"}
    pairs = understood("rerank", RERANK | fields)
    assert pairs.ranks
    assert pairs.share_query
    assert pairs.sizes_bytes == [2, 4, 2]
    assert orjson.loads(pairs_body(pairs, range(1, 3))) == {
        "model": "m", "query": "q", "documents": ["bé", "c"], "max_tokens_per_doc": 9, "return_documents": True,
        "instruction": "i",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("top_n", "of_one", "of_two"), [(0, None, None), (1, None, 1), (2, None, None), (9, None, None)]
)
def test_pieces_are_asked_for_no_more_than_can_be_among_the_best(
    top_n: int, of_one: int | None, of_two: int | None
) -> None:
    pairs = understood("rerank", RERANK | {"top_n": top_n})
    assert orjson.loads(pairs_body(pairs, range(2, 3))).get("top_n") == of_one
    assert orjson.loads(pairs_body(pairs, range(2))).get("top_n") == of_two
    assert wanted_of(pairs, 2) == (of_two or 2)


def test_queries_of_their_own_are_cut_with_their_documents() -> None:
    pairs = understood("score", SCORE)
    assert not pairs.share_query
    assert orjson.loads(pairs_body(pairs, range(1, 3))) == {"model": "m", "text_1": ["r", "s"], "text_2": ["b", "c"]}


@pytest.mark.parametrize("query", ["q", ["q"]])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_one_query_is_repeated_as_it_came(names: tuple[str, str], query: Any) -> None:
    pairs = understood("score", {names[0]: query, names[1]: ["a", "b"]})
    assert orjson.loads(pairs_body(pairs, range(1, 2))) == {"model": "m", names[0]: query, names[1]: ["b"]}


def test_a_query_is_cut_short_alike_on_both_sides_when_it_is_measured() -> None:
    pairs = understood("rerank", RERANK | {"max_tokens_per_doc": 5, "truncate_prompt_tokens": 7, "top_n": 1})
    measured = {"model": "m", "query": "q", "documents": ["q"], "truncate_prompt_tokens": 7}
    assert orjson.loads(query_body(pairs)) == measured
    pairs = understood("rerank", RERANK | {"max_tokens_per_doc": 5, "max_tokens_per_query": 3})
    assert orjson.loads(query_body(pairs)) == {
        "model": "m", "query": "q", "documents": ["q"], "max_tokens_per_query": 3, "max_tokens_per_doc": 3,
    }  # fmt: skip
    assert orjson.loads(query_body(understood("score", SCORE | {"text_1": ["q"]})))["text_1"] == "q"


def test_one_query_is_measured_once_however_many_documents_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def counted(text: str) -> int:
        measured.append(text)
        return len(text.encode())

    monkeypatch.setattr("gateway.features.embeddings.wire.text_bytes", counted)
    pairs = understood("rerank", {"model": "m", "query": "é" * 9, "documents": ["a"] * 5000})
    assert measured.count("é" * 9) == 1
    assert pairs.sizes_bytes == [19] * 5000


def test_what_pieces_repeat_is_all_but_what_they_share_out() -> None:
    pairs = understood("rerank", RERANK | {"instruction": "i" * 1000})
    each = len(pairs_body(pairs, range(1)))
    assert len(pairs_body(pairs, range(0))) == each - len('"a"')
    own = understood("score", SCORE | {"text_1": ["q" * 1000] * 3})
    assert len(pairs_body(own, range(0))) < 100


@pytest.mark.parametrize(
    ("endpoint", "document"),
    [
        ("rerank", RERANK | {"documents": "a"}),
        ("rerank", RERANK | {"documents": []}),
        ("rerank", RERANK | {"documents": ["a"] * (MOST_DOCUMENTS + 1)}),
        ("rerank", RERANK | {"documents": ["a", {"content": [{"type": "text", "text": "b"}]}]}),
        ("rerank", RERANK | {"query": ["q"]}),
        ("rerank", RERANK | {"query": {"content": []}}),
        ("rerank", RERANK | {"top_n": -1}),
        ("rerank", RERANK | {"top_n": None}),
        ("rerank", RERANK | {"top_n": True}),
        ("rerank", RERANK | {"request_id": "r"}),
        ("rerank", RERANK | {"mm_processor_kwargs": {}}),
        ("rerank", RERANK | {"max_tokens_per_doc": "9"}),
        ("rerank", RERANK | {"unheard_of": 1}),
        ("rerank", {"model": "m", "query": "q"}),
        ("rerank", SCORE),
        ("score", SCORE | {"text_1": ["q", "r"]}),
        ("score", SCORE | {"text_1": []}),
        ("score", SCORE | {"top_n": 2}),
        ("score", SCORE | {"queries": "q", "documents": ["a"]}),
        ("score", {"text_1": "q", "data_2": ["a"]}),
    ],
)
def test_what_is_not_understood_is_not_cut(endpoint: str, document: dict[str, Any]) -> None:
    assert pairs_of(endpoint, document, "m") is None


@pytest.mark.parametrize(
    ("document", "more"),
    [
        ({"query": "q" * 10, "documents": ["a"] * 5}, 40),
        ({"text_1": "é" * 10, "text_2": ["a"] * 5}, 120),
        ({"queries": ["q" * 10], "documents": ["a"] * 5}, 40),
        ({"data_1": ["q" * 10] * 5, "data_2": ["a"] * 5}, 0),
        ({"input": ["a"] * 5}, 0),
    ],
)
def test_a_query_is_scored_with_each_document(document: dict[str, Any], more: int) -> None:
    assert scored_bytes(document, 100, 5) == 100 + more
    assert scored_bytes(document, 100, 0) == 100
