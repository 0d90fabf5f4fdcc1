"""The prefix report: how much of the prompts is found in KV caches, and what keeps the rest from being found.

Counting is done on the event loop and costs about a microsecond a request; everything else is done when the report is
requested, on a snapshot, and may be done in another thread.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from gateway.insights.causes import breakers, find_cause
from gateway.insights.families import Breathe, build, find_families
from gateway.insights.samples import OTHERS, Application, Counts, Epoch, Holders, Reuse, Sample, Snapshot, total

Key = TypeVar("Key")
_SAME = 0.8  # of a prefix's requests with the same continuation: then the longer prefix stands for both
_EXCERPT_BYTES = 80
_MOST_ROWS = 20


def identity(key: int) -> str:
    return blake2b(key.to_bytes(8, "little", signed=key < 0), digest_size=4).hexdigest()


def counts(row: Counts) -> dict[str, Any]:
    """A row of counts, with its rates; None where no backend has reported usage."""
    prompt, reported = row.prompt_tokens, row.reported_prompt_tokens
    return {
        "requests": row.requests,
        "prompt_tokens": prompt,
        "predicted_hit_tokens": row.predicted_hit_tokens,
        "actual_hit_tokens": row.actual_hit_tokens if reported else None,
        "predicted_hit_rate": round(row.predicted_hit_tokens / prompt, 4) if prompt else None,
        "hit_rate": round(row.actual_hit_tokens / reported, 4) if reported else None,
    }


def merged(rows: Iterable[tuple[Key, Counts]]) -> dict[Key, Counts]:
    """The rows of each key, added up."""
    by_key: defaultdict[Key, list[Counts]] = defaultdict(list)
    for key, row in rows:
        by_key[key].append(row)
    return {key: total(each) for key, each in by_key.items()}


def clients(rows: dict[Application, Counts], most: int) -> list[dict[str, Any]]:
    by_client = merged((client, row) for (client, _), row in rows.items())
    entries = [{"client": client, **counts(row)} for client, row in by_client.items()]
    return sorted(entries, key=lambda entry: -entry["prompt_tokens"])[:most]


def applications(
    rows: dict[Application, Counts], samples: Sequence[Sample], most: int, show_text: bool
) -> list[dict[str, Any]]:
    """By first prefix block, and by name if all prompts with that block give the same one; most prompt tokens first.

    Prompts that begin like no other are one entry for each key.
    """
    names: dict[Application, set[str]] = {}
    texts: dict[Application, bytes] = {}
    for sample in samples:
        if sample.keys:
            names.setdefault((sample.client, sample.keys[0]), set()).add(sample.name)
            texts[sample.client, sample.keys[0]] = sample.text
    listed: dict[tuple[str, str], dict[str, Any]] = {}
    placed: list[tuple[tuple[str, str], Counts]] = []
    named = 0
    for application, row in sorted(rows.items(), key=lambda item: -item[1].prompt_tokens):
        client, first = application
        given = names.get(application, set())
        name = next(iter(given)) if len(given) == 1 else ""
        rare = first == OTHERS or row.requests < 2 or (named >= most and (client, name) not in listed)
        place = (client, "others" if rare else name or identity(first))
        placed.append((place, row))
        if place in listed:
            continue
        named += not rare
        listed[place] = {"id": "others" if rare else identity(first), "client": client, "name": "" if rare else name}
        if show_text and not rare:
            listed[place]["text"] = texts.get(application, b"")[:_EXCERPT_BYTES].decode(errors="replace")
    entries = [{**listed[place], **counts(row)} for place, row in merged(placed).items()]
    return sorted(entries, key=lambda entry: -entry["prompt_tokens"])


def hottest(
    epochs: Iterable[Epoch], samples: Sequence[Sample], most: int, show_text: bool, holders: Holders | None
) -> list[dict[str, Any]]:
    """Prefixes by the tokens that they saved. A prefix with nearly always the same continuation is left out: the longer
    one stands for both."""
    known: dict[int, Reuse] = {}
    for epoch in epochs:
        for key, reuse in epoch.prefixes.items():
            known[key] = known[key].plus(reuse) if key in known else reuse
    passed: dict[int, int] = {}  # by prefix, the requests of its commonest continuation
    for reuse in known.values():
        passed[reuse.parent] = max(passed.get(reuse.parent, 0), reuse.requests)
    ends = [item for item in known.items() if passed.get(item[0], 0) < _SAME * item[1].requests]
    ends.sort(key=lambda item: item[1].saved_tokens, reverse=True)
    listed = []
    for key, reuse in ends[:most]:
        entry: dict[str, Any] = {
            "id": identity(key),
            "bytes": reuse.size_bytes,
            "tokens": round(reuse.tokens),
            "requests": reuse.requests,
            "saved_tokens": round(reuse.saved_tokens),
            "backends": sorted(reuse.backends if holders is None else holders(key)),
        }
        if show_text:
            entry["text"] = _ending(samples, key)
        listed.append(entry)
    return listed


def _ending(samples: Sequence[Sample], key: int) -> str:
    """The last words of a prefix, which distinguish it from shorter ones."""
    for sample in reversed(samples):
        if key in sample.keys:
            edge = sample.edges[sample.keys.index(key)]
            return sample.text[:edge][-_EXCERPT_BYTES:].decode(errors="replace")
    return ""


def make_report(taken: Snapshot, breathe: Breathe) -> dict[str, Any]:
    """The report, wherever it is called: nothing else changes the snapshot."""
    show_text = taken.show_text
    rows = merged(item for epoch in taken.epochs for item in epoch.rows.items())
    breathe()
    in_window = counts(total(rows.values()))
    window_began = taken.epochs[0].began_seconds if taken.epochs else taken.now_seconds
    found, behind = _breakers(taken, breathe)
    return {
        "uptime_seconds": round(taken.uptime_seconds, 3),
        "window_seconds": round(min(taken.uptime_seconds, taken.now_seconds - window_began), 3),
        "show_text": show_text,
        "totals": {"since_start": counts(taken.since_start), "window": in_window},
        "shares": _shares(in_window, behind),
        "clients": clients(rows, _MOST_ROWS),
        "applications": applications(rows, taken.samples, _MOST_ROWS, show_text),
        "prefixes": hottest(taken.epochs, taken.samples, _MOST_ROWS, show_text, taken.holders),
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


def _breakers(taken: Snapshot, breathe: Breathe) -> tuple[list[dict[str, Any]], float]:
    """The causes of cold caches, the most expensive first, and the share of all prompt text behind a difference."""
    if not taken.samples:
        return [], 0.0
    corpus = build(_balanced(taken), breathe)
    samples = corpus.samples
    reported = [round(each.hit_tokens * each.size_bytes / max(1, each.prompt_tokens)) for each in samples]
    hits = np.where([each.has_usage for each in samples], np.array(reported, np.int64), corpus.matched())
    causes = []
    for family in find_families(corpus, hits, breathe):
        cause = find_cause(corpus, family)
        if cause is not None:
            causes.append(cause)
        breathe()
    whole = sum(sample.prompt_tokens * sample.weight for sample in samples)
    found = breakers(corpus, causes, taken.span_seconds, taken.show_text, taken.models)
    behind = sum(each["saved_tokens_per_request"] * each["requests"] for each in found)
    return found[:_MOST_ROWS], behind / max(1, whole)


def _shares(window: dict[str, Any], behind: float) -> dict[str, float | None]:
    """Of all prompt tokens: found in a cache, lost behind a difference, and the rest, which is new or was evicted."""
    hit = window["hit_rate"] if window["hit_rate"] is not None else window["predicted_hit_rate"]
    if hit is None:
        return {"hit": None, "behind_a_difference": None, "other": None}
    behind = round(min(behind, 1.0 - hit), 4)
    return {"hit": hit, "behind_a_difference": behind, "other": round(max(0.0, 1.0 - hit - behind), 4)}
