"""Bodies have the size they are named for, and groups share half of it."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.bench.bodies import GROUPS, MEMBERS, SIZES, chats, write_bodies
from tests.bench.place import Place


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_a_body_is_about_as_large_as_its_name_says(name: str, size: int) -> None:
    lengths = [len(json.dumps(chat)) for chat in chats(size, seed=1)]
    assert 0.95 * size < min(lengths) <= max(lengths) < 1.05 * size


def test_members_of_a_group_share_a_system_prompt_and_nothing_else() -> None:
    found = [chat["messages"] for chat in chats(1024, seed=1)]
    systems = Counter(messages[0]["content"] for messages in found)  # type: ignore[index]
    users = Counter(messages[1]["content"] for messages in found)  # type: ignore[index]
    assert len(systems) == GROUPS
    assert set(systems.values()) == {MEMBERS}
    assert set(users.values()) == {1}


def test_the_files_are_the_same_every_time_and_written_once(tmp_path: Path) -> None:
    first, second = Place(tmp_path / "1"), Place(tmp_path / "2")
    write_bodies(first)
    write_bodies(second)
    assert first.bodies("1k").read_bytes() == second.bodies("1k").read_bytes()
    second.bodies("1k").write_text("kept")
    write_bodies(second)
    assert second.bodies("1k").read_text() == "kept"
