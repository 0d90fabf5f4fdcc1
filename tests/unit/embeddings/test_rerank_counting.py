"""Two small requests show whether documents are scored one by one."""

import orjson
import pytest

from gateway.features.embeddings.inputs import Pairs
from gateway.features.embeddings.wire import Counting, probes


@pytest.mark.parametrize(
    ("once", "twice", "counting"),
    [
        pytest.param(4, 8, Counting.PAIRS, id="cross-encoder"),
        pytest.param(6, 9, Counting.QUERY_ONCE, id="embeddings"),
        pytest.param(2, 3, Counting.QUERY_ONCE, id="embeddings without special tokens"),
        pytest.param(130, 142, Counting.UNKNOWN, id="all documents in one prompt"),
        pytest.param(5, 5, Counting.UNKNOWN, id="no sense"),
    ],
)
def test_the_tokens_of_two_pairs_show_how_pairs_are_counted(once: int, twice: int, counting: Counting) -> None:
    assert Counting.of(once, twice) is counting


def test_probes_have_the_form_of_the_request() -> None:
    pairs = Pairs(
        ("text_1", "text_2"),
        "q",
        documents=["a"],
        sizes_bytes=[2],
        fields={"model": "m", "padding": "max_length"},
        ranks=False,
    )
    once, twice = map(orjson.loads, probes("m", pairs))
    assert once == {"model": "m", "text_1": "x", "text_2": ["x"]}
    assert twice == {"model": "m", "text_1": "x", "text_2": ["x", "x"]}
