"""What a backend answers is taken only if it is all there; each client's answer looks like the backend's own."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import WrongAnswer
from gateway.features.embeddings.wire import AnswerForm, Vectors, read_vectors, size_of, vector_pieces

RECORDINGS = Path(__file__).parents[2] / "contract" / "recordings"


def recorded(name: str) -> Any:
    return json.loads((RECORDINGS / f"{name}.json").read_text())["answer"]["json"]


def write_answer(vectors: Vectors, *, floats: bool) -> bytes:
    return b"".join(vector_pieces("x", vectors, floats=floats))


def changed(**fields: Any) -> bytes:
    return orjson.dumps(recorded("embedding_base64") | fields)


@pytest.mark.parametrize(("encoding", "floats"), [("embedding", True), ("embedding_base64", False)])
@pytest.mark.parametrize("form", ["embedding", "embedding_base64"])
def test_vllms_own_answer_comes_out_again_in_either_form(form: str, encoding: str, floats: bool) -> None:
    vectors = read_vectors(orjson.dumps(recorded(form)), 2)
    wanted = recorded(encoding)
    written = orjson.loads(write_answer(vectors, floats=floats))
    assert list(written) == list(wanted)
    assert written == wanted | {"id": "embd-x", "created": written["created"]}


def test_entries_are_put_in_order_and_numbered_anew() -> None:
    document = recorded("embedding_base64")
    first, second = document["data"]
    vectors = read_vectors(changed(data=[second, first]), 2)
    assert vectors.data == [first, second]
    [entry] = orjson.loads(write_answer(Vectors(vectors.form, vectors.data[1:], 3), floats=False))["data"]
    assert entry == second | {"index": 0}


@given(st.lists(st.tuples(st.text(), st.integers(0, 2**40)), min_size=1, max_size=4))
def test_each_client_of_a_batch_reads_its_own_id_and_tokens(clients: list[tuple[str, int]]) -> None:
    form = AnswerForm(recorded("embedding_base64"), "data")
    for request_id, tokens in clients:
        written = orjson.loads(b"".join(form.around(request_id, tokens)))
        assert written["data"] == []
        assert written["id"] == request_id
        assert written["usage"] == form.document["usage"] | {"prompt_tokens": tokens, "total_tokens": tokens}


ENTRY = {"index": 0, "object": "embedding", "embedding": "AAAA"}


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"[]", changed(data=None), changed(data=[]), changed(data=[ENTRY]), changed(data=[ENTRY] * 2),
        changed(data=[ENTRY] * 3), changed(data=[ENTRY, ENTRY | {"index": 2}]), changed(data=[ENTRY, 1]),
        changed(data=[ENTRY, ENTRY | {"index": -1}]), changed(data=[ENTRY, ENTRY | {"index": True}]),
        changed(data=[ENTRY, ENTRY | {"index": 1, "embedding": None}]),
        changed(data=[ENTRY, ENTRY | {"index": 1, "embedding": ""}]),
        changed(data=[ENTRY, ENTRY | {"index": 1, "embedding": "AAAAAAAA"}]),
        changed(data=[ENTRY, ENTRY | {"index": 1, "embedding": [0.5]}]),
        changed(usage=None), changed(usage={}), changed(usage={"prompt_tokens": -1}),
    ],
)  # fmt: skip
def test_an_answer_that_does_not_hold_what_was_asked_for_is_wrong(body: bytes) -> None:
    with pytest.raises(WrongAnswer):
        read_vectors(body, 2)


def test_embeddings_that_cannot_be_read_are_wrong() -> None:
    vectors = read_vectors(changed(data=[ENTRY | {"embedding": "AAA"}]), 1)
    with pytest.raises(WrongAnswer):
        write_answer(vectors, floats=True)


@pytest.mark.parametrize("floats", [False, True])
def test_a_long_answer_comes_in_pieces_that_are_never_long(floats: bool) -> None:
    text = recorded("embedding_base64")["data"][0]["embedding"]
    data = [{"index": index, "object": "embedding", "embedding": text} for index in range(300)]
    form = AnswerForm(recorded("embedding_base64"), "data")
    pieces = list(vector_pieces("x", Vectors(form, data, 7), floats=floats))
    written = orjson.loads(b"".join(pieces))
    assert [entry["index"] for entry in written["data"]] == list(range(300))
    assert written["usage"]["prompt_tokens"] == 7
    assert len(pieces) > 5
    assert max(map(len, pieces)) < 200_000
    assert 0.7 < size_of(data, floats=floats) / sum(map(len, pieces)) < 1.3
