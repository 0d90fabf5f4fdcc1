"""What kind of thing a differing piece of text is: a time, an id, a number, a name, or just words."""

import re
from enum import StrEnum


class Kind(StrEnum):
    """What differs between prompts that could share more."""

    TIMESTAMP = "timestamp"
    UUID = "uuid"
    ID = "id"
    EMAIL = "email"
    NUMBER = "number"
    NAME = "name"
    WORDS = "words"
    EXTRA_TEXT = "extra text"
    TOOL_ORDER = "tool order"
    JSON_KEY_ORDER = "JSON key order"
    TEXT_ORDER = "text order"
    CACHE_SALT = "cache salt"


_MONTH = rb"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\.?"
_DAY = rb"(?:(?:mon|tues?|wednes|wed|thurs?|fri|satur|sat|sun)(?:day)?,? )?"
_TIME = rb"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[ap]\.?m\.?)?(?: ?(?:z\b|utc|gmt|[+-]\d{2}:?\d{2}))?"
_DATE = (
    rb"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
    rb"|" + _DAY + _MONTH + rb" \d{1,2}(?:st|nd|rd|th)?(?:,? \d{4})?"
    rb"|" + _DAY + rb"\d{1,2} " + _MONTH + rb",? \d{4})"
)
_PATTERNS = (
    (Kind.UUID, re.compile(rb"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE)),
    (Kind.TIMESTAMP, re.compile(_DATE + rb"(?:(?:t|,? | at |, at )" + _TIME + rb")?|\b" + _TIME, re.IGNORECASE)),
    (Kind.EMAIL, re.compile(rb"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")),
    (Kind.TIMESTAMP, re.compile(rb"(?<![\w.])1[5-9]\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?(?![\w])")),
    (Kind.ID, re.compile(rb"\b(?=[\w-]*\d)(?=[\w-]*[a-z])(?:[0-9a-f]{8,}|[\w-]{12,})\b", re.IGNORECASE)),
    (Kind.NUMBER, re.compile(rb"(?<!\w)\d+(?:[.,]\d+)*(?!\w)")),
)
_NAME = re.compile(rb"[A-Z][\w'-]+(?: [A-Z][\w'.-]*){0,2}")
_WINDOW_BYTES = 96


def token_at(text: bytes, position: int) -> tuple[Kind, int, int] | None:
    """The time, id or number that the position is in, or at the end of: its kind, start and end in bytes."""
    base = max(0, position - _WINDOW_BYTES)
    window, place = text[base : position + _WINDOW_BYTES], position - base
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(window):
            if match.start() <= place < match.end() or match.start() < place == match.end():
                return kind, base + match.start(), base + match.end()
    return None


def kind_of_words(text: bytes) -> Kind:
    """Of a piece of text that no single token makes differ."""
    stripped = text.strip(b" \t\r\n,;:.!?\"'")
    if not stripped:
        return Kind.EXTRA_TEXT
    if _NAME.fullmatch(stripped):
        return Kind.NAME
    return Kind.WORDS


def kind_within(text: bytes) -> Kind | None:
    """The first thing in a short piece of text that is known to differ from request to request."""
    for kind, pattern in _PATTERNS:
        if kind is not Kind.NUMBER and pattern.search(text[:2048]):
            return kind
    return None
