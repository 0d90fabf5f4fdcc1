"""Families as the report tells them: what differs, where, how often, and what it costs."""

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

from gateway.observe.prefixes.advice import advice_on
from gateway.observe.prefixes.corpus import Corpus
from gateway.observe.prefixes.difference import Difference, compare, part_of
from gateway.observe.prefixes.families import Family, core_flags
from gateway.observe.prefixes.kinds import Kind, kind_within

_ORDERS = (Kind.TOOL_ORDER, Kind.JSON_KEY_ORDER, Kind.TEXT_ORDER)
_PAIRS = 48  # compared in a family
_LEAST_SEGMENT_SHARE = 0.01  # of the prompt: smaller ones are drawn with their neighbours
_MOST_SEGMENTS = 12
_EXCERPT_BYTES = 60


@dataclass(frozen=True, slots=True)
class Scale:
    """From samples to traffic: how long they were taken, and whether text may be shown."""

    seconds: float
    show_text: bool
    models: frozenset[str]  # that have answered; other names are a client's invention


def breaker(corpus: Corpus, family: Family, scale: Scale) -> dict[str, Any] | None:
    """A cause of lost hits, as a document; None if the prompts do not tell what differs."""
    found = _differences(corpus, family)
    if not found:
        return None
    kind, _ = Counter(each.kind for _, _, each in found).most_common(1)[0]
    alike = [entry for entry in found if entry[2].kind is kind]
    position, _ = Counter(each.start for _, _, each in alike).most_common(1)[0]
    if kind in _ORDERS:
        position = min(each.start for _, _, each in alike)
    samples = [corpus.samples[member] for member in family.members]
    size = sum(sample.size_bytes for sample in samples)
    tokens_per_byte = sum(sample.prompt_tokens for sample in samples) / max(1, size)
    requests = sum(sample.weight for sample in samples)
    per_hour = requests * 3600 / scale.seconds
    saved = round(family.mean_saving_bytes * tokens_per_byte)
    place = part_of(samples[0].text, position)
    where = "the request's cache_salt" if kind is Kind.CACHE_SALT else f"{place.name}, byte {place.offset_bytes:,}"
    document: dict[str, Any] = {
        "id": _id_of(corpus, family),
        "kind": kind.value,
        "part": "cache_salt" if kind is Kind.CACHE_SALT else place.name,
        "part_offset_bytes": place.offset_bytes,
        "position_bytes": position,
        "position_tokens": round(position * tokens_per_byte),
        "differs_bytes": int(np.median([end - each.start for _, _, each in alike for end in each.ends])),
        "shared_after_tokens": round(float(np.median(family.core_bytes)) * tokens_per_byte),
        "requests": requests,
        "requests_per_hour": round(per_hour),
        "saved_tokens_per_request": saved,
        "saved_tokens_per_hour": round(saved * per_hour),
        "samples": len(samples),
        "variants": int(family.branches.max()) + 1,
        "models": sorted({sample.model if sample.model in scale.models else "unknown" for sample in samples}),
        "clients": sorted({sample.client for sample in samples}),
        "also": _also(corpus, family, kind),
        "picture": _picture(corpus, family, kind, position, tokens_per_byte),
        "advice": advice_on(kind, where, saved),
    }
    if scale.show_text:
        document["examples"] = _examples(corpus, family, alike)
    return document


def _differences(corpus: Corpus, family: Family) -> list[tuple[int, int, Difference]]:
    """The first difference of neighbours in time, one of each branch."""
    _, firsts = np.unique(family.branches, return_index=True)
    places = np.sort(firsts)[: _PAIRS + 1].tolist()
    pairs = pairwise(places)
    compared = ((one, other, compare(corpus, family, one, other)) for one, other in pairs)
    return [(one, other, difference) for one, other, difference in compared if difference is not None]


def _id_of(corpus: Corpus, family: Family) -> str:
    """The same for the same shared text."""
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


def _picture(corpus: Corpus, family: Family, kind: Kind, position: int, tokens_per_byte: float) -> list[dict[str, Any]]:
    """A prompt of middle length from its beginning to its end, as runs of shared, differing, reordered and own text."""
    sizes = [len(corpus.samples[member].text) for member in family.members]
    member = int(np.argsort(sizes, kind="stable")[len(sizes) // 2])
    runs = [("shared", 0, position)] if position else []
    if kind is Kind.CACHE_SALT:
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


def _also(corpus: Corpus, family: Family, first: Kind) -> list[str]:
    """Kinds of what differs further on, within the shared text."""
    text = corpus.samples[family.members[-1]].text
    later = [
        (start, end) for what, start, end in _segments(corpus, family, len(family.members) - 1) if what == "differs"
    ]
    kinds = (kind_within(text[start:end]) for start, end in later[1:])
    return sorted({kind.value for kind in kinds if kind is not None and kind is not first})


def _examples(corpus: Corpus, family: Family, found: list[tuple[int, int, Difference]]) -> list[str]:
    """The differing text of some prompts."""
    examples: dict[str, None] = {}
    for one, other, each in found[:8]:
        for place, end in zip((one, other), each.ends, strict=True):
            text = corpus.samples[family.members[place]].text
            end = max(end, each.start + 24) if end == each.start else end
            examples[text[each.start : min(end, each.start + _EXCERPT_BYTES)].decode(errors="replace")] = None
    return list(examples)[:4]
