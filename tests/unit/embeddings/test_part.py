"""A part is what it is, and not what it looks like."""

from gateway.embeddings.members import Part


def test_parts_of_the_same_looks_are_two() -> None:
    one, other = Part(None, 0, 1, 2, 8), Part(None, 0, 1, 2, 8)
    assert one != other
    assert len({one, other}) == 2
