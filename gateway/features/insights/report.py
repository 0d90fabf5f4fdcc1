"""The prefix report: the cached share of prompts, and the causes of cache misses.

Counting costs about a microsecond a request on the event loop; everything else is done when the report is requested,
on a snapshot, and may be done in another thread.

The causes of cold caches are differences in families of prompts. A difference is the place where two prompts of a
family diverge, and its kind: a time, an id, a number, an order, or words. The cause of a family is the most frequent
first difference of its pairs of prompts, reported with its cost and a remedy.
"""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from gateway.features.insights.families import (
    LEAST_SAVING_BYTES,
    Breathe,
    Corpus,
    Family,
    build,
    core_flags,
    find_families,
)
from gateway.features.insights.samples import Sample, Snapshot, applications, clients, counts, hottest, merged, total

_PAIRS = 48  # compared in a family
_IN_ORDER = 0.9  # required share of the common text in the same order
_AGREE_BYTES = 12  # equal text required behind two tokens that count as the difference
_JSON_MEMBER = re.compile(rb'\s*\\?"[^"\\]+\\?"\s*:')
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_OPENING = (b"system", b"instructions", b"tools", b"documents")
_NOT_WRITTEN_BY_CLIENTS = ("(assistant)", "(tool)")
_LEAST_SHARE = 0.01  # least cost of a reported cause, as a share of all prompt tokens
_LEAST_DOUBTFUL_SHARE = 0.05
_LEAST_DOUBTFUL_OWN_SHARE = 0.2  # of the prompt tokens of its own requests
_BEYOND_DOUBT = 0.5  # of the same
_LEAST_SEGMENT_SHARE = 0.01  # of the prompt: smaller ones are drawn with their neighbours
_MOST_SEGMENTS = 12
_MOST_ROWS = 20
_EXCERPT_BYTES = 60

# Differences between prompts that could share more, and their remedies.
ADVICE = {
    "timestamp": "Move the time behind the shared text (into the last user message), or round it to the day",
    "uuid": "Take the id out of the prompt, or move it behind the shared text",
    "id": "Take the id out of the prompt, or move it behind the shared text",
    "email": "Move what is said of the user behind the shared text",
    "number": "Move the number behind the shared text",
    "name": "Move what looks like a name behind the shared text, as into the first user message",
    "words": "Put the shared text first, and what is different in each request behind it",
    "extra text": "Some prompts have text here that others lack: keep it in all, or move it behind the shared text; if"
    " it is old turns that are cut off, cut many at a time and seldom",
    "tool order": "Send the tools in a fixed order, sorted by name for instance",
    "JSON key order": "Write JSON with its keys in a fixed order (sort_keys=True)",
    "text order": "Keep the documents, examples or lines in a fixed order, and put what is always there first",
    "cache salt": "Give requests that may share a cache the same cache_salt: it is different in prompts that are the"
    " same",
}
_ORDERS = ("tool order", "JSON key order", "text order")
_MAY_BE_NATURAL = ("words", "name", "number", "text order", "extra text")

_MONTH = rb"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\.?"
_DAY = rb"(?:(?:mon|tues?|wednes|wed|thurs?|fri|satur|sat|sun)(?:day)?,? )?"
_TIME = rb"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[ap]\.?m\.?)?(?: ?(?:z\b|utc|gmt|[+-]\d{2}:?\d{2}))?"
_DATE = (
    rb"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
    rb"|" + _DAY + _MONTH + rb" \d{1,2}(?:st|nd|rd|th)?(?:,? \d{4})?"
    rb"|" + _DAY + rb"\d{1,2} " + _MONTH + rb",? \d{4})"
)
_PATTERNS = (
    ("uuid", re.compile(rb"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE)),
    ("timestamp", re.compile(_DATE + rb"(?:(?:t|,? | at |, at )" + _TIME + rb")?|\b" + _TIME, re.IGNORECASE)),
    ("email", re.compile(rb"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")),
    ("timestamp", re.compile(rb"(?<![\w.])1[5-9]\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?(?![\w])")),
    ("id", re.compile(rb"\b(?=[\w-]*\d)(?=[\w-]*[a-z])(?:[0-9a-f]{8,}|[\w-]{12,})\b", re.IGNORECASE)),
    ("number", re.compile(rb"(?<!\w)\d+(?:[.,]\d+)*(?!\w)")),
)
_NAME = re.compile(rb"[A-Z][\w'-]+(?: [A-Z][\w'.-]*){0,2}")
_WINDOW_BYTES = 96


def token_at(text: bytes, position: int) -> tuple[str, int, int] | None:
    """The time, id or number that the position is in, or at the end of: its kind, start and end in bytes."""
    base = max(0, position - _WINDOW_BYTES)
    window, place = text[base : position + _WINDOW_BYTES], position - base
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(window):
            if match.start() <= place < match.end() or match.start() < place == match.end():
                return kind, base + match.start(), base + match.end()
    return None


def kind_of_words(text: bytes) -> str:
    stripped = text.strip(b" \t\r\n,;:.!?\"'")
    if not stripped:
        return "extra text"
    return "name" if _NAME.fullmatch(stripped) else "words"


def kind_within(text: bytes) -> str | None:
    """The first thing in a short piece of text that is known to differ from request to request."""
    return next((kind for kind, pattern in _PATTERNS if kind != "number" and pattern.search(text[:2048])), None)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two prompts; the differing text is `[start, end)` of either."""

    kind: str
    start: int
    ends: tuple[int, int]
    _: KW_ONLY
    texts: tuple[bytes, bytes]


def common_prefix(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    differs = np.frombuffer(one[:length], np.uint8) != np.frombuffer(other[:length], np.uint8)
    return int(differs.argmax()) if differs.any() else length


def compare(corpus: Corpus, family: Family, one: int, other: int) -> Difference | None:
    """The first difference of two members (by place); None if one begins with the other."""
    first, second = family.members[one], family.members[other]
    texts = corpus.samples[first].text, corpus.samples[second].text
    if corpus.content[corpus.rows[first]] != corpus.content[corpus.rows[second]]:
        return Difference("cache salt", 0, (0, 0), texts=texts)
    start = common_prefix(*texts)
    if start == min(map(len, texts)):
        return None
    if (found := _token(texts, start)) is not None:
        return found
    common = _common_pieces(corpus, family, one, other)
    if _share_in_order(common) < _IN_ORDER:
        return Difference(_order_kind(texts, start), start, (start, start), texts=texts)
    return _words(texts, start, common)


def _token(texts: tuple[bytes, bytes], start: int) -> Difference | None:
    """The difference, if it is a token of one kind in both, and the same text follows."""
    tokens = token_at(texts[0], start), token_at(texts[1], start)
    if tokens[0] is None or tokens[1] is None or tokens[0][:2] != tokens[1][:2]:
        return None
    ends = tokens[0][2], tokens[1][2]
    if texts[0][ends[0] : ends[0] + _AGREE_BYTES] != texts[1][ends[1] : ends[1] + _AGREE_BYTES]:
        return None
    return Difference(tokens[0][0], tokens[0][1], ends, texts=texts)


def _common_pieces(corpus: Corpus, family: Family, one: int, other: int) -> list[tuple[int, int, int]]:
    """Texts that occur once in both behind the difference, by start in the first: starts and size in bytes."""
    once = []
    for place in (one, other):
        rows = np.arange(family.first_row[place], corpus.rows[family.members[place] + 1])
        rows = rows[corpus.distinctive[corpus.content[rows]]]
        _, at, times = np.unique(corpus.content[rows], return_index=True, return_counts=True)
        once.append(rows[at[times == 1]])
    one_rows, other_rows = once
    both = np.intersect1d(corpus.content[one_rows], corpus.content[other_rows], return_indices=True)
    first, second = one_rows[both[1]], other_rows[both[2]]
    found = zip(corpus.start[first].tolist(), corpus.start[second].tolist(), corpus.size[first].tolist(), strict=True)
    return sorted(found)


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
    """Text up to the next common text, widened to whole words."""
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
    kind = kinds[0] if kinds[0] == kinds[1] else "words"
    return Difference("extra text" if "extra text" in kinds else kind, start, ends, texts=texts)


def _order_kind(texts: tuple[bytes, bytes], start: int) -> str:
    if part_of(texts[0], start)[0] == "tools":
        one, other = (_tools(text) for text in texts)
        if one is None or other is None or sorted(map(orjson.dumps, one)) == sorted(map(orjson.dumps, other)):
            return "tool order"
        return "JSON key order"
    if all(len(_JSON_MEMBER.findall(text[max(0, start - 128) : start + 512])) >= 3 for text in texts):
        return "JSON key order"
    return "text order"


def _tools(text: bytes) -> list[object] | None:
    try:
        tools = dict(orjson.loads(text.split(b"\x1e", 1)[0])).get("tools")
    except (ValueError, TypeError):
        return None
    return tools if isinstance(tools, list) else None


def part_of(text: bytes, position: int) -> tuple[str, int]:
    """The part of a prompt that a position is in, and how many bytes of the part are before it."""
    turn = text.rfind(b"\x1e", 0, position + 1)
    if turn >= 0:
        number = text.count(b"\x1e", 0, turn)
        head = text[turn + 1 : turn + 40].partition(b"\x1f")[0].decode(errors="replace")
        role = head if head in _ROLES else "other"
        return f"messages[{number}] ({role})", max(0, position - turn - 2 - len(head))
    if not text.startswith(b'[["'):
        return "prompt", position
    name, start = "opening", 0
    for field in _OPENING:
        at = text.find(b'["' + field + b'",', start, position + 1)
        if at >= 0:
            name, start = field.decode(), at + len(field) + 5  # behind the comma and the value's first mark
    return name, max(0, position - start)


@dataclass(frozen=True, slots=True)
class Cause:
    """A difference in a family, and its place; `shown_by` pairs of members."""

    family: Family
    kind: str
    part: tuple[str, int]  # its name, and the bytes before the place
    _: KW_ONLY
    position_bytes: int
    shown_by: tuple[Difference, ...]


def find_cause(corpus: Corpus, family: Family) -> Cause | None:
    """The cause, if the author of the prompts could fix it."""
    _, branches = np.unique(family.branches, return_index=True)
    neighbours = pairwise(np.sort(branches)[: _PAIRS + 1].tolist())  # in time, one member of each branch
    compared = (compare(corpus, family, one, other) for one, other in neighbours)
    found = [difference for difference in compared if difference is not None]
    if not found:
        return None
    kind, _ = Counter(each.kind for each in found).most_common(1)[0]
    alike = tuple(each for each in found if each.kind == kind)
    position, _ = Counter(each.start for each in alike).most_common(1)[0]
    if kind in _ORDERS:
        position = min(each.start for each in alike)
    if kind in _MAY_BE_NATURAL and kind != "extra text" and not _is_written(corpus, family):
        return None  # of a history that is cut, answers are a part
    part = ("cache_salt", 0) if kind == "cache salt" else part_of(alike[0].texts[0], position)
    return Cause(family, kind, part, position_bytes=position, shown_by=alike)


def _is_written(corpus: Corpus, family: Family) -> bool:
    """Whether enough of the core is in messages that clients write.

    Agents read the same files at different times, and models repeat themselves: no client can move such text.
    """
    member = len(family.members) // 2
    text = corpus.samples[family.members[member]].text
    rows = np.arange(family.first_row[member], family.core_end[member])
    rows = rows[core_flags(corpus, family.is_core, rows, np.zeros(len(rows), np.int64))]
    written, start = 0, 0
    while start < len(text):
        end = text.find(b"\x1e", start + 1)
        end = len(text) if end < 0 else end
        if not part_of(text, start)[0].endswith(_NOT_WRITTEN_BY_CLIENTS):
            inside = (corpus.start[rows] >= start - 1) & (corpus.start[rows] < end)
            written += int(corpus.size[rows[inside]].sum())
        start = end
    return written >= LEAST_SAVING_BYTES


def breakers(corpus: Corpus, causes: Sequence[Cause], taken: Snapshot) -> list[dict[str, Any]]:
    """A document for each relevant cause, the most expensive first; families with the same cause share one."""
    groups: dict[object, list[Cause]] = {}
    for cause in causes:
        sources = frozenset((corpus.samples[each].model, corpus.samples[each].client) for each in cause.family.members)
        groups.setdefault((cause.kind, cause.part, sources), []).append(cause)
    documents = [_breaker(corpus, group, taken) for group in groups.values()]
    whole = sum(sample.prompt_tokens * sample.weight for sample in corpus.samples)
    relevant = [document for document in documents if _matters(document, whole)]
    return sorted(relevant, key=lambda document: -document["saved_tokens_per_hour"])


def _matters(document: dict[str, Any], whole_tokens: float) -> bool:
    """Text that recurs by chance, such as documents retrieved for a question, is a small part of the whole."""
    share = document["saved_tokens_per_request"] * document["requests"] / max(1, whole_tokens)
    own_share = document["saved_share"]
    if document["kind"] in _MAY_BE_NATURAL and own_share < _BEYOND_DOUBT:
        return bool(share >= _LEAST_DOUBTFUL_SHARE and own_share >= _LEAST_DOUBTFUL_OWN_SHARE)
    return bool(share >= _LEAST_SHARE)


def _breaker(corpus: Corpus, causes: Sequence[Cause], taken: Snapshot) -> dict[str, Any]:
    main = max(causes, key=lambda cause: len(cause.family.members))
    family, kind, (part, offset) = main.family, main.kind, main.part
    samples = [corpus.samples[member] for cause in causes for member in cause.family.members]
    tokens_per_byte = sum(each.prompt_tokens for each in samples) / max(1, sum(each.size_bytes for each in samples))
    requests = sum(sample.weight for sample in samples)
    per_hour = requests * 3600 / taken.span_seconds
    # The average saving of a request, except for the first of its family.
    weights = np.array([corpus.samples[member].weight for cause in causes for member in cause.family.members[1:]])
    savings = np.concatenate([cause.family.saving_bytes[1:] for cause in causes])
    saved = round(float((savings * weights).sum() / max(1.0, weights.sum())) * tokens_per_byte)
    where = "the request's cache_salt" if kind == "cache salt" else f"{part}, byte {offset:,}"
    document: dict[str, Any] = {
        "id": blake2b(np.sort(corpus.digest[family.is_core]).tobytes(), digest_size=4).hexdigest(),
        "kind": kind,
        "part": part,
        "part_offset_bytes": offset,
        "position_bytes": main.position_bytes,
        "position_tokens": round(main.position_bytes * tokens_per_byte),
        "differs_bytes": int(np.median([end - each.start for each in main.shown_by for end in each.ends])),
        "shared_after_tokens": round(float(np.median(family.core_bytes)) * tokens_per_byte),
        "requests": round(requests),
        "requests_per_hour": round(per_hour),
        "saved_tokens_per_request": saved,
        "saved_tokens_per_hour": round(saved * per_hour),
        "saved_share": round(saved * len(samples) / max(1, sum(each.prompt_tokens for each in samples)), 4),
        "samples": len(samples),
        "variants": sum(int(cause.family.branches.max()) + 1 for cause in causes),
        # A model that has not answered is a client's invention.
        "models": sorted({sample.model if sample.model in taken.models else "unknown" for sample in samples}),
        "clients": sorted({sample.client for sample in samples}),
        "also": _also(corpus, family, kind),
        "picture": _picture(corpus, main, tokens_per_byte),
        "advice": f"{ADVICE[kind]}; it is in {where}. This saves about {saved:,} tokens of prefill a request.",
    }
    if taken.show_text:
        document["examples"] = _examples(main)
    return document


def _segments(corpus: Corpus, family: Family, member: int) -> list[tuple[str, int, int]]:
    """A member behind the branching, as runs of text: (shared | differs | own, start, end)."""
    rows = np.arange(family.first_row[member], family.core_end[member])
    core = core_flags(corpus, family.is_core, rows, np.zeros(len(rows), np.int64))
    whole = len(corpus.samples[family.members[member]].text)
    least = _LEAST_SEGMENT_SHARE * whole
    segments: list[tuple[str, int, int]] = []
    for row, is_core in zip(rows.tolist(), core.tolist(), strict=True):
        start, end = int(corpus.start[row]), int(corpus.start[row] + corpus.size[row])
        what = "shared" if is_core else "differs"
        if segments and (segments[-1][0] == what or (len(segments) > 1 and end - start < least)):
            segments[-1] = (segments[-1][0], segments[-1][1], end)
        else:
            segments.append((what, start, end))
    last = segments[-1][2] if segments else 0
    if last < whole:
        segments.append(("own", last, whole))
    return segments


def _picture(corpus: Corpus, cause: Cause, tokens_per_byte: float) -> list[dict[str, Any]]:
    """A prompt of middle length from its beginning to its end, as runs of shared, differing, reordered and own text."""
    family, kind, position = cause.family, cause.kind, cause.position_bytes
    sizes = [len(corpus.samples[member].text) for member in family.members]
    member = int(np.argsort(sizes, kind="stable")[len(sizes) // 2])
    runs = [("shared", 0, position)] if position else []
    if kind == "cache salt":
        runs.append(("differs", 0, 0))
    for segment, start, end in _segments(corpus, family, member):
        begin, what = max(start, position), segment
        if kind in _ORDERS and segment != "own":
            what = "reordered"
        if end <= begin:
            continue
        if runs and (runs[-1][0] == what or (len(runs) >= _MOST_SEGMENTS and what != "own")):
            runs[-1] = (runs[-1][0], runs[-1][1], end)
        else:
            runs.append((what, begin, end))
    return [{"what": what, "tokens": round((end - start) * tokens_per_byte)} for what, start, end in runs]


def _also(corpus: Corpus, family: Family, first: str) -> list[str]:
    """Kinds of further differences within the shared text."""
    text = corpus.samples[family.members[-1]].text
    segments = _segments(corpus, family, len(family.members) - 1)
    later = [text[start:end] for what, start, end in segments if what == "differs"][1:]
    return sorted({kind for kind in map(kind_within, later) if kind is not None and kind != first})


def _examples(cause: Cause) -> list[str]:
    examples: dict[str, None] = {}
    for each in cause.shown_by[:8]:
        for text, end in zip(each.texts, each.ends, strict=True):
            end = min(end if end > each.start else each.start + 24, each.start + _EXCERPT_BYTES)
            examples[text[each.start : end].decode(errors="replace")] = None
    return list(examples)[:4]


def make_report(taken: Snapshot, breathe: Breathe) -> dict[str, Any]:
    """The report, wherever it is called: nothing else changes the snapshot."""
    show_text = taken.show_text
    rows = merged(item for epoch in taken.epochs for item in epoch.rows.items())
    breathe()
    in_window = counts(total(rows.values()))
    window_began = taken.epochs[0].began_seconds if taken.epochs else taken.now_seconds
    found, behind = _causes(taken, breathe)
    return {
        "uptime_seconds": round(taken.uptime_seconds, 3),
        "window_seconds": round(min(taken.uptime_seconds, taken.now_seconds - window_began), 3),
        "show_text": show_text,
        "totals": {"since_start": counts(taken.since_start), "window": in_window},
        "shares": _shares(in_window, behind),
        "clients": clients(rows, _MOST_ROWS),
        "applications": applications(rows, taken.samples, _MOST_ROWS, show_text),
        "prefixes": hottest(taken.epochs, taken.samples, _MOST_ROWS, show_text=show_text, holders=taken.holders),
        "breakers": found,
        "samples": {
            "kept": len(taken.samples),
            "bytes": sum(len(sample.text) for sample in taken.samples),
            "of_requests": sum(sample.weight for sample in taken.samples),
            "seconds": round(taken.span_seconds, 3),
        },
    }


def _balanced(taken: Snapshot) -> list[Sample]:
    """The samples, weighted so that each API key has its share of the requests: that is known exactly."""
    ends = [*(epoch.began_seconds for epoch in taken.epochs[1:]), taken.now_seconds]
    recent = [epoch for epoch, end in zip(taken.epochs, ends, strict=False) if end >= taken.samples[0].at_seconds]
    rows = merged((client, row) for epoch in recent for (client, _), row in epoch.rows.items())
    counted = {client: row.requests for client, row in rows.items()}
    sampled: defaultdict[str, float] = defaultdict(float)
    for sample in taken.samples:
        sampled[sample.client] += sample.weight
    known = [client for client in sampled if client in counted]
    scale = sum(sampled[client] for client in known) / max(1, sum(counted[client] for client in known))
    factors = {client: scale * counted[client] / sampled[client] for client in known}
    return [replace(sample, weight=sample.weight * factors.get(sample.client, 1.0)) for sample in taken.samples]


def _causes(taken: Snapshot, breathe: Breathe) -> tuple[list[dict[str, Any]], float]:
    """The causes of cold caches, the most expensive first, and the share of all prompt text behind a difference."""
    if not taken.samples:
        return [], 0.0
    corpus = build(_balanced(taken), breathe)
    samples = corpus.samples
    reported = [round(each.hit_tokens * each.size_bytes / max(1, each.prompt_tokens)) for each in samples]
    hits = np.where([each.has_usage for each in samples], np.array(reported, np.int64), corpus.matched())
    causes = []
    for family in find_families(corpus, hits, breathe):
        if (cause := find_cause(corpus, family)) is not None:
            causes.append(cause)
        breathe()
    whole = sum(sample.prompt_tokens * sample.weight for sample in samples)
    found = breakers(corpus, causes, taken)
    behind = sum(each["saved_tokens_per_request"] * each["requests"] for each in found)
    return found[:_MOST_ROWS], behind / max(1, whole)


def _shares(window: dict[str, Any], behind: float) -> dict[str, float | None]:
    """Of all prompt tokens: found in a cache, lost behind a difference, and the rest, which is new or was evicted."""
    hit = window["hit_rate"] if window["hit_rate"] is not None else window["predicted_hit_rate"]
    if hit is None:
        return {"hit": None, "behind_a_difference": None, "other": None}
    behind = round(min(behind, 1.0 - hit), 4)
    return {"hit": hit, "behind_a_difference": behind, "other": round(max(0.0, 1.0 - hit - behind), 4)}
