"""How many sequences a request runs on an engine, over the table of routes: what generates takes a slot for each."""

from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.request import Kind
from tests.unit.front.test_read import read, reader
from tests.unit.front.test_salts import BODIES, TURNS, posted

LISTS: dict[bytes, list[tuple[dict[str, Any], int]]] = {
    b"/v1/chat/completions": [
        ({"messages": TURNS}, 1),
        ({"messages": TURNS, "n": 3}, 3),
        ({"messages": TURNS, "n": 3, "use_beam_search": True}, 3),
        ({"messages": TURNS, "documents": [{}, {}]}, 1),
    ],
    b"/v1/chat/completions/batch": [
        ({"messages": [TURNS] * 4}, 4),
        ({"messages": [TURNS] * 4, "n": 3}, 12),
        ({"messages": [TURNS], "n": 5}, 5),
    ],
    b"/v1/completions": [
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": ["a", "b"], "n": 2, "best_of": 5}, 10),
        ({"prompt": ["a", "b"], "n": 4, "use_beam_search": True}, 8),
    ],
    b"/v1/responses": [({"input": "a"}, 1), ({"input": TURNS * 9}, 1)],
    b"/v1/messages": [({"messages": TURNS * 9, "max_tokens": 9}, 1)],
    b"/generative_scoring": [({"query": "a", "items": ["b"] * 7, "label_token_ids": [1]}, 7)],
    b"/v1/embeddings": [
        ({"input": ["a"] * 5}, 5),
        ({"input": [1, 2]}, 1),
        ({"input": [[1], [2]]}, 2),
        ({"messages": TURNS * 3}, 1),
        ({"messages": [TURNS] * 3}, 3),
    ],
    b"/v2/embed": [({"texts": ["a"] * 4}, 4)],
    b"/v1/score": [({"text_1": "a", "text_2": ["b"] * 3}, 3), ({"queries": ["a"] * 2, "documents": ["b"] * 2}, 2)],
    b"/v1/rerank": [({"query": "a", "documents": ["b"] * 3}, 3)],
    b"/pooling": [({"input": ["a", "b"]}, 2), ({"messages": [TURNS] * 3}, 3)],
    b"/classify": [({"input": ["a", "b"]}, 2), ({"messages": [TURNS] * 3}, 3)],
}
SAME = {b"/score": b"/v1/score", b"/rerank": b"/v1/rerank", b"/v2/rerank": b"/v1/rerank"}
TAKE_NO_SLOT = {b"/tokenize", b"/detokenize", b"/v1/messages/count_tokens"}


def test_each_route_that_uses_an_engine_is_here() -> None:
    assert {path for path, _ in posted() if b"/audio/" not in path} == LISTS.keys() | SAME.keys() | TAKE_NO_SLOT


@pytest.mark.parametrize(("path", "route"), [each for each in posted() if each[0] not in TAKE_NO_SLOT | SAME.keys()])
def test_every_sequence_is_counted(path: bytes, route: Any) -> None:
    for document, sequences in LISTS.get(path, ()):
        for sent in (path, *(other for other, same in SAME.items() if same == path)):
            demand = read({"model": "m"} | document, sent).demand
            assert (demand.sequences, document) == (sequences, document)
            generates = route.kind is Kind.GENERATE or route.decodes
            assert demand.divisible == (not generates), "what generates never runs more sequences than it has slots"


@pytest.mark.parametrize("path", sorted(TAKE_NO_SLOT))
def test_what_runs_no_sequence_takes_no_slot(path: bytes) -> None:
    assert read({"model": "m"} | BODIES[path], path).demand.sequences == 0


@pytest.mark.parametrize(
    ("path", "document", "param"),
    [
        (b"/v1/completions", {"prompt": ["a"] * 3, "n": 3}, "n"),
        (b"/v1/chat/completions", {"messages": TURNS, "n": 9}, "n"),
        (b"/v1/chat/completions/batch", {"messages": [TURNS] * 9}, "messages"),
        (b"/v1/chat/completions/batch", {"messages": [TURNS] * 3, "n": 3}, "messages"),
    ],
)
def test_more_than_a_request_may_have_are_refused(path: bytes, document: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=r"needs 9 sequences .* limit of 8 per") as refused:
        read({"model": "m"} | document, path, through=reader(max_sequences=8))
    assert refused.value.param == param
