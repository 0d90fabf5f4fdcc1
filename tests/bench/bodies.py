"""Request bodies: chats that share long system prompts in groups, as the users of one application do."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tests.bench.place import Place

SIZES = {"1k": 1024, "16k": 16384}
GROUPS, MEMBERS = 100, 20
_ENVELOPE_BYTES = 120
_PROSE_WORDS = 100_000
_WORDS = """
    system answer token prefix cache engine batch prompt please explain the a of in to with for when how why user table
    number value list code error file server request reply short long first last every other same
"""


def chats(size: int, seed: int) -> Iterator[dict[str, object]]:
    """Chat bodies of about SIZE bytes in random order; half of each is its group's system prompt, half is its own."""
    rng = random.Random(seed)
    prose = " ".join(rng.choices(_WORDS.split(), k=_PROSE_WORDS))
    half = (size - _ENVELOPE_BYTES) // 2

    def text(opening: str) -> str:
        """HALF characters that start with OPENING."""
        start = rng.randrange(len(prose) - half)
        return opening + prose[start : start + half - len(opening)]

    systems = [text(f"grp-{group:04d} ") for group in range(GROUPS)]
    order = [(group, member) for group in range(GROUPS) for member in range(MEMBERS)]
    rng.shuffle(order)
    for group, member in order:
        messages = [
            {"role": "system", "content": systems[group]},
            {"role": "user", "content": text(f"member {group}/{member}: ")},
        ]
        yield {"model": "mock", "messages": messages, "temperature": 0.7}


def write_bodies(place: Place) -> None:
    """Write the bodies of every size, the same ones on every machine."""
    written_by = Path(__file__)
    for name, size in SIZES.items():
        path = place.bodies(name)
        if path.exists() and path.stat().st_mtime > written_by.stat().st_mtime:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(chat) + "\n" for chat in chats(size, seed=size)))
        partial.rename(path)
