"""The prefixes that recur most, and applications: rows of the report made of tallies."""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

from gateway.insights.samples import (
    ACTUAL,
    OTHERS,
    PREDICTED,
    PROMPT,
    REPORTED_PROMPT,
    REQUESTS,
    Application,
    Epoch,
    Reuse,
    Sample,
    add_up,
)

Holders = Callable[[int], Iterable[str]]
_SAME = 0.8  # of a prefix's requests that go on alike: then the longer one speaks for both
_EXCERPT_BYTES = 80


def identity(key: int) -> str:
    """A prefix as it is named in the report."""
    return blake2b(key.to_bytes(8, "little", signed=key < 0), digest_size=4).hexdigest()


def counts(row: Sequence[int]) -> dict[str, Any]:
    """A row of counts, with its rates; None where no backend has told."""
    prompt, reported = row[PROMPT], row[REPORTED_PROMPT]
    return {
        "requests": row[REQUESTS],
        "prompt_tokens": prompt,
        "predicted_hit_tokens": row[PREDICTED],
        "actual_hit_tokens": row[ACTUAL] if reported else None,
        "predicted_hit_rate": round(row[PREDICTED] / prompt, 4) if prompt else None,
        "hit_rate": round(row[ACTUAL] / reported, 4) if reported else None,
    }


def merged_rows(epochs: Iterable[Epoch]) -> dict[Application, list[int]]:
    """The counts of each application over all epochs."""
    rows: dict[Application, list[int]] = {}
    for epoch in epochs:
        for application, row in epoch.rows.items():
            known = rows.get(application)
            rows[application] = row if known is None else add_up((known, row))
    return rows


def clients(rows: dict[Application, list[int]], most: int) -> list[dict[str, Any]]:
    """By API key, most prompt tokens first."""
    by_client: dict[str, list[int]] = {}
    for (client, _), row in rows.items():
        by_client[client] = add_up((by_client.get(client, [0] * 5), row))
    ranked = sorted(by_client.items(), key=lambda item: item[1][PROMPT], reverse=True)
    return [{"client": client, **counts(row)} for client, row in ranked[:most]]


def applications(
    rows: dict[Application, list[int]], samples: Sequence[Sample], most: int, show_text: bool
) -> list[dict[str, Any]]:
    """By what the prompts begin with, and by name where all that begin alike give the same; most prompt tokens first.

    What begins like nothing else is told together, for each key.
    """
    names: dict[Application, set[str]] = {}
    texts: dict[Application, bytes] = {}
    for sample in samples:
        if sample.keys:
            names.setdefault((sample.client, sample.keys[0]), set()).add(sample.name)
            texts[sample.client, sample.keys[0]] = sample.text
    listed: dict[tuple[str, str], dict[str, Any]] = {}
    sums: dict[tuple[str, str], list[int]] = {}
    told_apart = 0
    for application, row in sorted(rows.items(), key=lambda item: item[1][PROMPT], reverse=True):
        client, first = application
        given = names.get(application, set())
        name = next(iter(given)) if len(given) == 1 else ""
        rare = first == OTHERS or row[REQUESTS] < 2 or (told_apart >= most and (client, name) not in listed)
        place = (client, "others" if rare else name or identity(first))
        sums[place] = add_up((sums.get(place, [0] * 5), row))
        if place in listed:
            continue
        told_apart += not rare
        listed[place] = {"id": "others" if rare else identity(first), "client": client, "name": "" if rare else name}
        if show_text and not rare:
            listed[place]["text"] = texts.get(application, b"")[:_EXCERPT_BYTES].decode(errors="replace")
    told = [{**listed[place], **counts(row)} for place, row in sums.items()]
    return sorted(told, key=lambda entry: -int(entry["prompt_tokens"]))


def hottest(
    epochs: Iterable[Epoch], samples: Sequence[Sample], most: int, show_text: bool, holders: Holders | None
) -> list[dict[str, Any]]:
    """Prefixes by the tokens that they saved. One that nearly always goes on alike is told by the longer one alone."""
    known: dict[int, Reuse] = {}
    for epoch in epochs:
        for key, reuse in epoch.prefixes.items():
            older = known.get(key)
            known[key] = reuse if older is None else older.plus(reuse)
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
    """The last words of a prefix, which tell it from shorter ones."""
    for sample in reversed(samples):
        if key in sample.keys:
            edge = sample.edges[sample.keys.index(key)]
            return sample.text[:edge][-_EXCERPT_BYTES:].decode(errors="replace")
    return ""
