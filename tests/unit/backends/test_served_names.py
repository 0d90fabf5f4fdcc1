"""What names in lists of models say of each other."""

import pytest

from gateway.core.backends.facts import ModelCard
from gateway.core.backends.served_names import ServedNames

R, S = "/weights/r", "/weights/s"


def cards(*names: str, root: str | None = R) -> list[ModelCard]:
    return [ModelCard(name, root=root) for name in names]


ADAPTER = ModelCard("lora", root="/adapters/lora", parent="a")


@pytest.mark.parametrize(
    ("lists", "first", "weights"),
    [
        ([cards("a")], {}, {"a": "a"}),
        ([cards("a", "b", "c")], {"b": "a", "c": "a"}, {"a": "a", "b": "a", "c": "a"}),
        ([cards("a", "b"), cards("a", "b")], {"b": "a"}, {"a": "a", "b": "a"}),
        # Answers have the first name of their engine, which differs.
        ([cards("a", "b"), cards("b", "a")], {"a": "a", "b": "a"}, {"a": "a", "b": "a"}),
        # Not on the same backends: a request for one cannot go wherever the other is.
        ([cards("a", "b"), cards("a")], {"b": "b"}, {"a": "a", "b": "a"}),
        ([cards("a", "b"), cards("b")], {"b": "b"}, {"a": "a", "b": "a"}),
        ([cards("a"), cards("b")], {}, {"a": "a", "b": "b"}),
        ([[*cards("a"), *cards("b", root=S)]], {}, {"a": "a", "b": "b"}),
        ([[*cards("a", "b"), ADAPTER]], {"b": "a"}, {"a": "a", "b": "a"}),
        ([cards("a", "b", root=None)], {}, {}),  # engines that say nothing of weights
        ([], {}, {}),
    ],
)
def test_names_of_the_same_weights(
    lists: list[list[ModelCard]], first: dict[str, str], weights: dict[str, str]
) -> None:
    names = ServedNames()
    assert names.update(lists) == bool(lists)
    assert (names.first, names.weights) == (first, weights)
    assert not names.update(lists)


def test_two_adapters_of_one_root_are_two_models() -> None:
    names = ServedNames()
    twins = [ModelCard(name, root="/adapters/lora", parent="a") for name in ("one", "two")]
    names.update([[*cards("a"), *twins]])
    assert (names.first, names.weights) == ({}, {"a": "a"})
    assert names.families == {"a": "a", "one": "a", "two": "a"}


def test_lists_that_change_are_followed_in_place() -> None:
    names = ServedNames()
    first = names.first
    names.update([cards("a", "b")])
    names.update([cards("b")])
    assert first is names.first
    assert (first, names.weights) == ({}, {"b": "b"})
