"""Vectors keep every bit on their way, in whatever form."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import WrongAnswer
from gateway.features.embeddings.wire import as_base64, as_floats

RECORDINGS = Path(__file__).parents[2] / "contract" / "recordings"
FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=16)


def recorded(name: str) -> list[Any]:
    answer = json.loads((RECORDINGS / f"{name}.json").read_text())["answer"]["json"]
    return [entry["embedding"] for entry in answer["data"]]


def test_vllms_base64_becomes_the_very_floats_that_vllm_writes() -> None:
    assert orjson.loads(orjson.dumps(list(map(as_floats, recorded("embedding_base64"))))) == recorded("embedding")


def test_vllms_floats_become_the_very_base64_that_vllm_writes() -> None:
    assert list(map(as_base64, recorded("embedding"))) == recorded("embedding_base64")


@given(FLOATS)
def test_there_and_back_nothing_is_lost(values: list[float]) -> None:
    text = b64encode(np.array(values, "<f4").tobytes()).decode()
    floats = orjson.loads(orjson.dumps(as_floats(text)))
    assert floats == np.array(values, "<f4").astype(np.float64).tolist()
    assert as_base64(floats) == as_base64(text) == text


def test_floats_that_are_there_already_stay_as_they_are() -> None:
    assert as_floats([0.5, 1]) == [0.5, 1]


@pytest.mark.parametrize("wrong", ["AAA", "AA==", "no base64", "AAAA\n"])
def test_what_is_no_base64_of_floats_is_refused(wrong: str) -> None:
    with pytest.raises(WrongAnswer):
        as_floats(wrong)


@pytest.mark.parametrize("wrong", [["a"], [[1], [1, 2]], [None, {}]], ids=str)
def test_what_is_no_list_of_numbers_is_refused(wrong: list[Any]) -> None:
    with pytest.raises(WrongAnswer):
        as_base64(wrong)
