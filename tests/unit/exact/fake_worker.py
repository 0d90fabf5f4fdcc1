"""A tokenizer process that starts at once: each letter is a token. Some prompts make it misbehave."""

import os
import sys
import time
from array import array
from typing import Any

from gateway.features.exact.conversation import NotUnderstood, read
from gateway.features.exact.tokenizer import CannotLoad, Worker, serve

COMMAND = (sys.executable, "-m", "tests.unit.exact.fake_worker")
DIES, HANGS = "#dies", "#hangs"
SLOW_SECONDS = 0.4


class Letters:
    """Stands for a `ModelTokenizer`."""

    def __init__(self, source: str, cache_bytes: int) -> None:
        if source == "missing":
            raise CannotLoad("missing cannot be loaded")
        self.segmented = True

    def tokens(self, endpoint: str, document: dict[str, Any], content_format: str, features: list[str]) -> bytes:
        """The letters' code points."""
        reading = read(endpoint, document, content_format)
        if not reading.features <= set(features):
            raise NotUnderstood("a feature too many")
        text = letters_of(endpoint, document, content_format)
        misbehave(text)
        return array("I", map(ord, text)).tobytes()

    def counts(self, texts: list[str], *, special: bool) -> list[int]:
        """The letters of each, and two special ones."""
        for text in texts:
            misbehave(text)
        return [len(text) + 2 * special for text in texts]


def misbehave(text: str) -> None:
    """What some texts bring about."""
    match text:
        case "#dies":
            os._exit(3)
        case "#hangs":
            time.sleep(60)
        case "#slow":
            time.sleep(SLOW_SECONDS)
        case "#fails":
            raise RuntimeError("on purpose")


def letters_of(endpoint: str, document: dict[str, Any], content_format: str) -> str:
    """The text of a prompt."""
    reading = read(endpoint, document, content_format)
    return reading.text if reading.text is not None else repr((reading.messages, reading.tools, reading.variables))


if __name__ == "__main__":
    with os.fdopen(os.dup(0), "rb") as questions, os.fdopen(os.dup(1), "wb") as answers:
        serve(questions, answers, Worker(Letters).answer)  # type: ignore[arg-type]
