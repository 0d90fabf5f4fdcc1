"""Where two prompts of a family go apart, and what differs there: a time, an id, a number, an order, or words."""

import re
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum

import orjson

from gateway.insights.corpus import Corpus
from gateway.insights.families import Family

_IN_ORDER = 0.9  # share of the common text that has to stand in the same order
_AGREE_BYTES = 12  # that have to follow two tokens, so that they are what differs
_JSON_MEMBER = re.compile(rb'\s*\\?"[^"\\]+\\?"\s*:')
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_OPENING = (b"system", b"instructions", b"tools", b"documents")


class DifferenceKind(StrEnum):
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
    (DifferenceKind.UUID, re.compile(rb"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE)),
    (
        DifferenceKind.TIMESTAMP,
        re.compile(_DATE + rb"(?:(?:t|,? | at |, at )" + _TIME + rb")?|\b" + _TIME, re.IGNORECASE),
    ),
    (DifferenceKind.EMAIL, re.compile(rb"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")),
    (DifferenceKind.TIMESTAMP, re.compile(rb"(?<![\w.])1[5-9]\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?(?![\w])")),
    (DifferenceKind.ID, re.compile(rb"\b(?=[\w-]*\d)(?=[\w-]*[a-z])(?:[0-9a-f]{8,}|[\w-]{12,})\b", re.IGNORECASE)),
    (DifferenceKind.NUMBER, re.compile(rb"(?<!\w)\d+(?:[.,]\d+)*(?!\w)")),
)
_NAME = re.compile(rb"[A-Z][\w'-]+(?: [A-Z][\w'.-]*){0,2}")
_WINDOW_BYTES = 96


def token_at(text: bytes, position: int) -> tuple[DifferenceKind, int, int] | None:
    """The time, id or number that the position is in, or at the end of: its kind, start and end in bytes."""
    base = max(0, position - _WINDOW_BYTES)
    window, place = text[base : position + _WINDOW_BYTES], position - base
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(window):
            if match.start() <= place < match.end() or match.start() < place == match.end():
                return kind, base + match.start(), base + match.end()
    return None


def kind_of_words(text: bytes) -> DifferenceKind:
    stripped = text.strip(b" \t\r\n,;:.!?\"'")
    if not stripped:
        return DifferenceKind.EXTRA_TEXT
    if _NAME.fullmatch(stripped):
        return DifferenceKind.NAME
    return DifferenceKind.WORDS


def kind_within(text: bytes) -> DifferenceKind | None:
    """The first thing in a short piece of text that is known to differ from request to request."""
    for kind, pattern in _PATTERNS:
        if kind is not DifferenceKind.NUMBER and pattern.search(text[:2048]):
            return kind
    return None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two prompts; the differing text is `[start, end)` of either."""

    kind: DifferenceKind
    start: int
    ends: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a prompt, and how far into it a position is."""

    name: str
    offset_bytes: int


def common_prefix(one: bytes, other: bytes, start: int = 0) -> int:
    """How many leading bytes are the same; `start` of them are known to be."""
    low, high = start, min(len(one), len(other))
    step = 64
    while low + step < high and one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(high, low + step)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def compare(corpus: Corpus, family: Family, one: int, other: int) -> Difference | None:
    """The first difference of two members (by place); None if one begins with the other."""
    first, second = family.members[one], family.members[other]
    texts = corpus.samples[first].text, corpus.samples[second].text
    if corpus.content[corpus.rows[first]] != corpus.content[corpus.rows[second]]:
        return Difference(DifferenceKind.CACHE_SALT, 0, (0, 0))
    start = common_prefix(*texts)
    if start == min(map(len, texts)):
        return None
    if (found := _token(texts, start)) is not None:
        return found
    common = _common_pieces(corpus, family, one, other)
    if _share_in_order(common) < _IN_ORDER:
        return Difference(_order_kind(texts, start), start, (start, start))
    return _words(texts, start, common)


def _token(texts: tuple[bytes, bytes], start: int) -> Difference | None:
    """The difference, if it is a token of one kind in both, and the same text follows."""
    tokens = token_at(texts[0], start), token_at(texts[1], start)
    if tokens[0] is None or tokens[1] is None or tokens[0][:2] != tokens[1][:2]:
        return None
    ends = tokens[0][2], tokens[1][2]
    if texts[0][ends[0] : ends[0] + _AGREE_BYTES] != texts[1][ends[1] : ends[1] + _AGREE_BYTES]:
        return None
    return Difference(tokens[0][0], tokens[0][1], ends)


def _common_pieces(corpus: Corpus, family: Family, one: int, other: int) -> list[tuple[int, int, int]]:
    """What both have once behind the difference, by its start in the first: starts, and size, in bytes."""
    places: list[dict[int, tuple[int, int]]] = []
    for place in (one, other):
        rows = slice(family.first_row[place], corpus.rows[family.members[place] + 1])
        chosen = corpus.distinctive[corpus.content[rows]]
        columns = (column[rows][chosen].tolist() for column in (corpus.content, corpus.start, corpus.size))
        found: dict[int, tuple[int, int]] = {}
        repeated = set()
        for content, start, size in zip(*columns, strict=True):
            if content in found:
                repeated.add(content)
            else:
                found[content] = start, size
        places.append({content: value for content, value in found.items() if content not in repeated})
    first, second = places
    return [(at, second[content][0], size) for content, (at, size) in first.items() if content in second]


def _share_in_order(common: list[tuple[int, int, int]]) -> float:
    """How much of the common text keeps its order: the heaviest increasing run, by patience on starts."""
    tails: list[int] = []
    weights: list[int] = []  # of the best run that ends at the start in `tails`
    for _, start, size in common:
        place = bisect_left(tails, start)
        weight = size + (weights[place - 1] if place else 0)
        if place < len(tails) and tails[place] == start:
            weights[place] = max(weights[place], weight)
            continue
        tails.insert(place, start)
        weights.insert(place, weight)
        while place + 1 < len(tails) and weights[place + 1] <= weight:
            del tails[place + 1], weights[place + 1]
    whole = sum(size for _, _, size in common)
    return weights[-1] / whole if whole else 1.0


def _words(texts: tuple[bytes, bytes], start: int, common: list[tuple[int, int, int]]) -> Difference | None:
    """Text up to what both have again, widened to whole words."""
    for at, also, size in common:
        skipped = max(0, start - at, start - also)
        if skipped < size:
            again = at + skipped, also + skipped
            break
    else:
        return None
    one, other = (text[start:end] for text, end in zip(texts, again, strict=True))
    same = common_prefix(one[::-1], other[::-1])
    ends = again[0] - same, again[1] - same
    if any(text[start : start + 1].isalnum() for text in texts):
        while start > 0 and texts[0][start - 1 : start].isalnum():
            start -= 1
    if any(text[end - 1 : end].isalnum() for text, end in zip(texts, ends, strict=True)):
        while texts[0][ends[0] : ends[0] + 1].isalnum() and ends[0] < again[0]:
            ends = ends[0] + 1, ends[1] + 1
    kinds = [kind_of_words(text[start:end]) for text, end in zip(texts, ends, strict=True)]
    if DifferenceKind.EXTRA_TEXT in kinds:
        return Difference(DifferenceKind.EXTRA_TEXT, start, ends)
    return Difference(kinds[0] if kinds[0] is kinds[1] else DifferenceKind.WORDS, start, ends)


def _order_kind(texts: tuple[bytes, bytes], start: int) -> DifferenceKind:
    tools = [_tools(text) for text in texts]
    inside = part_of(texts[0], start).name == "tools"
    if inside and tools[0] is not None and tools[1] is not None:
        as_they_are = [sorted(map(orjson.dumps, each)) for each in tools if each is not None]
        return DifferenceKind.TOOL_ORDER if as_they_are[0] == as_they_are[1] else DifferenceKind.JSON_KEY_ORDER
    if inside:
        return DifferenceKind.TOOL_ORDER
    following = [text[max(0, start - 128) : start + 512] for text in texts]
    if all(len(_JSON_MEMBER.findall(text)) >= 3 for text in following):
        return DifferenceKind.JSON_KEY_ORDER
    return DifferenceKind.TEXT_ORDER


def _tools(text: bytes) -> list[object] | None:
    """The tools of a prompt's opening, if it was kept whole."""
    try:
        opening = dict(orjson.loads(text.split(b"\x1e", 1)[0]))
    except (ValueError, TypeError):
        return None
    tools = opening.get("tools")
    return tools if isinstance(tools, list) else None


def part_of(text: bytes, position: int) -> PromptPart:
    turn = text.rfind(b"\x1e", 0, position + 1)
    if turn >= 0:
        number = text.count(b"\x1e", 0, turn)
        head = text[turn + 1 : turn + 40].partition(b"\x1f")[0].decode(errors="replace")
        role = head if head in _ROLES else "other"
        return PromptPart(f"messages[{number}] ({role})", max(0, position - turn - 2 - len(head)))
    if not text.startswith(b'[["'):
        return PromptPart("prompt", position)
    name, start = "opening", 0
    for field in _OPENING:
        at = text.find(b'["' + field + b'",', start, position + 1)
        if at >= 0:
            name, start = field.decode(), at + len(field) + 5  # behind the comma and the value's first mark
    return PromptPart(name, max(0, position - start))
