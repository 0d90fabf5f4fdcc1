"""The causes of cold caches: found in families of prompts, and described with their cost and what to change.

The cause of a family is the one difference that most pairs of its prompts show first.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

from gateway.insights.corpus import Corpus
from gateway.insights.difference import Difference, DifferenceKind, PromptPart, compare, kind_within, part_of
from gateway.insights.families import LEAST_SAVING_BYTES, Family, core_flags

ORDERS = (DifferenceKind.TOOL_ORDER, DifferenceKind.JSON_KEY_ORDER, DifferenceKind.TEXT_ORDER)
_PAIRS = 48  # compared in a family
MAY_BE_NATURAL = (
    DifferenceKind.WORDS,
    DifferenceKind.NAME,
    DifferenceKind.NUMBER,
    DifferenceKind.TEXT_ORDER,
    DifferenceKind.EXTRA_TEXT,
)
_NOT_WRITTEN_BY_CLIENTS = ("(assistant)", "(tool)")

_LEAST_SHARE = 0.01  # of all prompt tokens, that a cause has to cost
_LEAST_DOUBTFUL_SHARE = 0.05
_LEAST_DOUBTFUL_OWN_SHARE = 0.2  # of the prompt tokens of its own requests
_BEYOND_DOUBT = 0.5  # of the same
_LEAST_SEGMENT_SHARE = 0.01  # of the prompt: smaller ones are drawn with their neighbours
_MOST_SEGMENTS = 12
_EXCERPT_BYTES = 60

_ADVICE = {
    DifferenceKind.TIMESTAMP: "Move the time behind the shared text (into the last user message), or round it"
    " to the day",
    DifferenceKind.UUID: "Take the id out of the prompt, or move it behind the shared text",
    DifferenceKind.ID: "Take the id out of the prompt, or move it behind the shared text",
    DifferenceKind.EMAIL: "Move what is said of the user behind the shared text",
    DifferenceKind.NAME: "Move what looks like a name behind the shared text, as into the first user message",
    DifferenceKind.NUMBER: "Move the number behind the shared text",
    DifferenceKind.WORDS: "Put the shared text first, and what is different in each request behind it",
    DifferenceKind.EXTRA_TEXT: "Some prompts have text here that others lack: keep it in all, or move it behind the"
    " shared text; if it is old turns that are cut off, cut many at a time and seldom",
    DifferenceKind.TOOL_ORDER: "Send the tools in a fixed order, sorted by name for instance",
    DifferenceKind.JSON_KEY_ORDER: "Write JSON with its keys in a fixed order (sort_keys=True)",
    DifferenceKind.TEXT_ORDER: "Keep the documents, examples or lines in a fixed order, and put what is always"
    " there first",
    DifferenceKind.CACHE_SALT: "Give requests that may share a cache the same cache_salt: it is different in prompts"
    " that are the same",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """What differs in a family, and where. `shown_by` are pairs of members (by place) with their difference."""

    family: Family
    kind: DifferenceKind
    part: PromptPart
    position_bytes: int
    shown_by: tuple[tuple[int, int, Difference], ...]


def find_cause(corpus: Corpus, family: Family) -> Cause | None:
    """The cause, if it is one that the author of the prompts could fix."""
    found = _differences(corpus, family)
    if not found:
        return None
    kind, _ = Counter(each.kind for _, _, each in found).most_common(1)[0]
    alike = tuple(entry for entry in found if entry[2].kind is kind)
    position, _ = Counter(each.start for _, _, each in alike).most_common(1)[0]
    if kind in ORDERS:
        position = min(each.start for _, _, each in alike)
    part = part_of(corpus.samples[family.members[alike[0][0]]].text, position)
    if kind in MAY_BE_NATURAL and kind is not DifferenceKind.EXTRA_TEXT and not _is_written(corpus, family):
        return None  # of a history that is cut, answers are a part
    return Cause(
        family, kind, PromptPart("cache_salt", 0) if kind is DifferenceKind.CACHE_SALT else part, position, alike
    )


def _differences(corpus: Corpus, family: Family) -> list[tuple[int, int, Difference]]:
    """The first difference of neighbours in time, one of each branch."""
    _, firsts = np.unique(family.branches, return_index=True)
    pairs = pairwise(np.sort(firsts)[: _PAIRS + 1].tolist())
    compared = ((one, other, compare(corpus, family, one, other)) for one, other in pairs)
    return [(one, other, difference) for one, other, difference in compared if difference is not None]


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
        if not part_of(text, start).name.endswith(_NOT_WRITTEN_BY_CLIENTS):
            inside = (corpus.start[rows] >= start - 1) & (corpus.start[rows] < end)
            written += int(corpus.size[rows[inside]].sum())
        start = end
    return written >= LEAST_SAVING_BYTES


@dataclass(frozen=True, slots=True)
class Scale:
    """From samples to traffic: how long they were taken, and whether text may be shown."""

    seconds: float
    show_text: bool
    models: frozenset[str]  # that have answered; other names are a client's invention


def breakers(corpus: Corpus, causes: Sequence[Cause], scale: Scale) -> list[dict[str, Any]]:
    """A document for each cause that matters, the most expensive first; one for the same cause in several families."""
    groups: dict[object, list[Cause]] = {}
    for cause in causes:
        sources = frozenset((corpus.samples[each].model, corpus.samples[each].client) for each in cause.family.members)
        groups.setdefault((cause.kind, cause.part, sources), []).append(cause)
    documents = [_breaker(corpus, group, scale) for group in groups.values()]
    whole = sum(sample.prompt_tokens * sample.weight for sample in corpus.samples)
    relevant = [document for document in documents if _matters(document, whole)]
    return sorted(relevant, key=lambda document: -document["saved_tokens_per_hour"])


def _matters(document: dict[str, Any], whole_tokens: float) -> bool:
    """Text that recurs by chance, such as documents retrieved for a question, is a small part of the whole."""
    doubtful = document["kind"] in MAY_BE_NATURAL and document["saved_share"] < _BEYOND_DOUBT
    share = document["saved_tokens_per_request"] * document["requests"] / max(1, whole_tokens)
    if doubtful:
        return bool(share >= _LEAST_DOUBTFUL_SHARE and document["saved_share"] >= _LEAST_DOUBTFUL_OWN_SHARE)
    return bool(share >= _LEAST_SHARE)


def _breaker(corpus: Corpus, causes: Sequence[Cause], scale: Scale) -> dict[str, Any]:
    main = max(causes, key=lambda cause: len(cause.family.members))
    family, kind, part = main.family, main.kind, main.part
    samples = [corpus.samples[member] for cause in causes for member in cause.family.members]
    tokens_per_byte = sum(each.prompt_tokens for each in samples) / max(1, sum(each.size_bytes for each in samples))
    requests = sum(sample.weight for sample in samples)
    per_hour = requests * 3600 / scale.seconds
    saved = round(_mean_saving_bytes(corpus, causes) * tokens_per_byte)
    where = (
        "the request's cache_salt" if kind is DifferenceKind.CACHE_SALT else f"{part.name}, byte {part.offset_bytes:,}"
    )
    document: dict[str, Any] = {
        "id": _id_of(corpus, family),
        "kind": kind.value,
        "part": part.name,
        "part_offset_bytes": part.offset_bytes,
        "position_bytes": main.position_bytes,
        "position_tokens": round(main.position_bytes * tokens_per_byte),
        "differs_bytes": int(np.median([end - each.start for _, _, each in main.shown_by for end in each.ends])),
        "shared_after_tokens": round(float(np.median(family.core_bytes)) * tokens_per_byte),
        "requests": round(requests),
        "requests_per_hour": round(per_hour),
        "saved_tokens_per_request": saved,
        "saved_tokens_per_hour": round(saved * per_hour),
        "saved_share": round(saved * len(samples) / max(1, sum(each.prompt_tokens for each in samples)), 4),
        "samples": len(samples),
        "variants": sum(int(cause.family.branches.max()) + 1 for cause in causes),
        "models": sorted({sample.model if sample.model in scale.models else "unknown" for sample in samples}),
        "clients": sorted({sample.client for sample in samples}),
        "also": _also(corpus, family, kind),
        "picture": _picture(corpus, main, tokens_per_byte),
        "advice": advice_on(kind, where, saved),
    }
    if scale.show_text:
        document["examples"] = _examples(corpus, main)
    return document


def _mean_saving_bytes(corpus: Corpus, causes: Sequence[Cause]) -> float:
    """Of a request that is not the first of its family, weighted by sample."""
    saved = weight = 0.0
    for cause in causes:
        weights = np.array([corpus.samples[member].weight for member in cause.family.members[1:]])
        saved += float((cause.family.saving_bytes[1:] * weights).sum())
        weight += float(weights.sum())
    return saved / max(1.0, weight)


def _id_of(corpus: Corpus, family: Family) -> str:
    digests = np.sort(corpus.digest[family.is_core]).tobytes()
    return blake2b(digests, digest_size=4).hexdigest()


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
    if kind is DifferenceKind.CACHE_SALT:
        runs.append(("differs", 0, 0))
    for segment, start, end in _segments(corpus, family, member):
        begin, what = max(start, position), segment
        if kind in ORDERS and segment != "own":
            what = "reordered"
        if end <= begin:
            continue
        if runs and (runs[-1][0] == what or (len(runs) >= _MOST_SEGMENTS and what != "own")):
            runs[-1] = (runs[-1][0], runs[-1][1], end)
        else:
            runs.append((what, begin, end))
    return [{"what": what, "tokens": round((end - start) * tokens_per_byte)} for what, start, end in runs]


def _also(corpus: Corpus, family: Family, first: DifferenceKind) -> list[str]:
    """Kinds of what differs further on, within the shared text."""
    text = corpus.samples[family.members[-1]].text
    later = [
        (start, end) for what, start, end in _segments(corpus, family, len(family.members) - 1) if what == "differs"
    ]
    kinds = (kind_within(text[start:end]) for start, end in later[1:])
    return sorted({kind.value for kind in kinds if kind is not None and kind is not first})


def _examples(corpus: Corpus, cause: Cause) -> list[str]:
    examples: dict[str, None] = {}
    for one, other, each in cause.shown_by[:8]:
        for place, end in zip((one, other), each.ends, strict=True):
            text = corpus.samples[cause.family.members[place]].text
            end = max(end, each.start + 24) if end == each.start else end
            examples[text[each.start : min(end, each.start + _EXCERPT_BYTES)].decode(errors="replace")] = None
    return list(examples)[:4]


def advice_on(kind: DifferenceKind, place: str, saved_tokens: int) -> str:
    return f"{_ADVICE[kind]}; it is in {place}. This saves about {saved_tokens:,} tokens of prefill a request."
