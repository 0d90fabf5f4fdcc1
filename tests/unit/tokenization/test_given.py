from array import array
from typing import Any

import pytest

from gateway.tokenization.given import given_tokens


@pytest.mark.parametrize("prompt", [[1, 2, 70000], [[1, 2, 70000]]])
def test_a_completions_own_token_ids_are_its_tokens(prompt: list[Any]) -> None:
    assert given_tokens({"prompt": prompt}, "completions") == array("I", [1, 2, 70000]).tobytes()


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"prompt": "text"},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["1", "2"]},
        {"prompt": [1, True]},
        {"prompt": [1, 2.0]},
        {"prompt": [-1]},
        {"prompt": [1 << 32]},
        {"prompt": [[1], [2]]},
        {"prompt": [1, 2], "truncate_prompt_tokens": 1},
        {"prompt": [1, 2], "prompt_embeds": "x"},
        {"prompt": [1, 2], "suffix": "x"},
    ],
)
def test_what_is_not_one_list_of_ids_as_it_is_gives_none(document: dict[str, Any]) -> None:
    assert given_tokens(document, "completions") is None


def test_other_endpoints_give_no_ids() -> None:
    assert given_tokens({"prompt": [1, 2]}, "chat") is None
