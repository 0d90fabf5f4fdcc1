"""Reads traces: JSON lines of Mooncake, of Alibaba and of vLLM's timed_trace, sessions, and Azure's CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import mode
from typing import Any, TypeVar

import orjson


class TraceError(Exception):
    """A trace that cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded request. `keys` are of its prompt's full blocks, chained: equal keys mean equal prefixes.

    In a trace of sessions `at_seconds` is the session's start, and `think_seconds` the pause after the answer before.
    """

    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    _: KW_ONLY
    keys: tuple[int, ...] = ()
    session: int | None = None
    think_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of time; sessions' rows in order of their turns."""

    name: str
    rows: Sequence[Row]
    block_tokens: int
    _: KW_ONLY
    tick_seconds: float = 0.0  # the common divisor of its times, if coarse
    sessions: bool = field(default=False)

    @property
    def span_seconds(self) -> float:
        """From time zero to the last arrival, and the mean gap after it."""
        last = max(row.at_seconds for row in self.rows) + self.tick_seconds
        arrivals = len({row.session for row in self.rows}) if self.sessions else len(self.rows)
        return max(last * (1 + 1 / arrivals), 1e-3)

    @property
    def rate_per_second(self) -> float:
        """Requests per second, as recorded; for sessions, the rate of a steady stream of them."""
        return len(self.rows) / self.span_seconds


_COARSE_TICK_SECONDS = 0.5  # times that lie at least this far apart were rounded, and are spread again
_CLOCK_ERROR_SECONDS = 0.0025
_MOONCAKE_BLOCK_TOKENS = 512
_AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
_PLAIN_BLOCK_TOKENS = 16
_T = TypeVar("_T")
_Document = dict[str, Any]
_POWERS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def read_trace(
    path: Path, block_tokens: int | None = None, limit: int | None = None, minutes: float | None = None
) -> Trace:
    """The trace in `path`; its first line shows its format. `limit` rows, or the rows of the first `minutes`.

    Raises TraceError.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return _read(path, file, block_tokens, limit=limit, minutes=minutes)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None


def _read(
    path: Path, lines: Iterable[str], block_tokens: int | None, limit: int | None, minutes: float | None
) -> Trace:
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise TraceError(f"{path}: is empty")
    if first[1].strip().removeprefix("\ufeff") == _AZURE_HEAD:
        rows, block = list(first_rows(_azure_rows(path, numbered), limit, minutes)), block_tokens or _PLAIN_BLOCK_TOKENS
        return _trace(path, rows, block, sessions=False)
    documents = list(_documents(path, first, numbered))
    parse, length = _json_format(path, documents)
    usual = _MOONCAKE_BLOCK_TOKENS if parse is _mooncake else None
    block = block_tokens or usual or _block_tokens(path, documents, length)
    parsed = (_checked(path, number, lambda: parse(document, block)) for number, document in documents)  # noqa: B023
    rows = list(first_rows(parsed, limit, minutes))
    return _trace(path, rows, block, sessions=parse is _session)


def _trace(path: Path, rows: list[Row], block_tokens: int, *, sessions: bool) -> Trace:
    if not rows:
        raise TraceError(f"{path}: has no requests")
    if not sessions:
        rows.sort(key=lambda row: row.at_seconds)
        start = rows[0].at_seconds
        rows = [
            Row(row.at_seconds - start, row.prompt_tokens, row.output_tokens, keys=row.keys) if start else row
            for row in rows
        ]
    return Trace(path.stem, rows, block_tokens, tick_seconds=0.0 if sessions else _tick(rows), sessions=sessions)


def _tick(rows: list[Row]) -> float:
    """The gap between recorded times if they were rounded to a coarse clock (that may be a millisecond off), else 0."""
    times = sorted({row.at_seconds for row in rows})
    gaps = [gap for before, after in pairwise(times) if (gap := after - before) > _CLOCK_ERROR_SECONDS]
    return mode(round(gap, 1) for gap in gaps) if gaps and min(gaps) >= _COARSE_TICK_SECONDS else 0.0


def first_rows(rows: Iterator[Row], limit: int | None, minutes: float | None) -> Iterator[Row]:
    start: float | None = None
    for count, row in enumerate(rows):
        start = row.at_seconds if start is None else start
        if limit is not None and count >= limit:
            return
        if minutes is None or row.at_seconds - start < minutes * 60:
            yield row


def _documents(
    path: Path, first: tuple[int, str], others: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, _Document]]:
    def document(number: int, line: str) -> _Document:
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise TraceError(f"{path}:{number}: neither JSON nor Azure's CSV: {error}") from None
        if not isinstance(value, dict):
            raise TraceError(f"{path}:{number}: not a JSON object")
        return value

    yield first[0], document(*first)
    for number, line in others:
        yield number, document(number, line)


def _json_format(path: Path, documents: list[tuple[int, _Document]]) -> tuple[Callable[[_Document, int], Row], str]:
    """How to read lines like the first, and where they have the prompt's length."""
    number, document = documents[0]
    if "timestamp" in document:
        return (_in_seconds if _has_seconds(documents) else _mooncake), "input_length"
    if "session_id" in document:
        return _session, "input_length"
    if "t" in document:
        return _scaled, "input_tokens"
    raise TraceError(f"{path}:{number}: unknown format; a line has `timestamp`, `t` or `session_id`, or it is a CSV")


def _has_seconds(documents: list[tuple[int, _Document]]) -> bool:
    """Mooncake's times are whole milliseconds; a fraction, or a chat's id as in Alibaba's traces, means seconds."""
    times = (document.get("timestamp") for _, document in documents)
    return "chat_id" in documents[0][1] or any(isinstance(at, float) and not at.is_integer() for at in times)


def _block_tokens(path: Path, documents: list[tuple[int, _Document]], length: str) -> int:
    """The power of two that makes as many blocks as the longest prompt has ids: full ones, perhaps a partial one."""
    number, longest = max(documents, key=lambda line: len(line[1].get("hash_ids") or ()))
    ids, tokens = _checked(path, number, lambda: (len(_ids(longest)), _whole(longest, length)))
    for block in _POWERS:
        if ids - 1 <= tokens // block <= ids:
            return block
    raise TraceError(f"{path}:{number}: {ids} hash_ids for {tokens} tokens; give the block size")


def _checked(path: Path, number: int, made: Callable[[], _T]) -> _T:
    try:
        return made()
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}:{number}: {reason}") from None


def _mooncake(document: _Document, block: int) -> Row:
    at = _number(document, "timestamp") / 1000
    return _row(
        at, _whole(document, "input_length"), _whole(document, "output_length"), ids=_ids(document), block=block
    )


def _in_seconds(document: _Document, block: int) -> Row:
    at = _number(document, "timestamp")
    return _row(
        at, _whole(document, "input_length"), _whole(document, "output_length"), ids=_ids(document), block=block
    )


def _scaled(document: _Document, block: int) -> Row:
    at = _number(document, "t")
    return _row(
        at, _whole(document, "input_tokens"), _whole(document, "output_tokens"), ids=_ids(document), block=block
    )


def _session(document: _Document, block: int) -> Row:
    plain = _row(
        _number(document, "arrival"),
        _whole(document, "input_length"),
        _whole(document, "output_length"),
        ids=_ids(document),
        block=block,
    )
    session, think = _whole(document, "session_id"), _number(document, "think_s")
    return Row(
        plain.at_seconds,
        plain.prompt_tokens,
        plain.output_tokens,
        keys=plain.keys,
        session=session,
        think_seconds=think,
    )


def _row(at: float, prompt: int, output: int, ids: list[int], block: int) -> Row:
    if at < 0 or prompt < 1 or output < 1:
        raise ValueError("times must not be negative, lengths at least 1")
    full = prompt // block
    if len(ids) < full:
        raise ValueError(f"{len(ids)} hash_ids for {full} full blocks of {block} tokens")
    return Row(at, prompt, output, keys=tuple(ids[:full]))


def _azure_rows(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Row]:
    start: datetime | None = None
    for number, line in lines:
        when, prompt, output = _checked(path, number, lambda: _azure_fields(line))  # noqa: B023 - called at once
        start = start or when
        yield Row(max(0.0, (when - start).total_seconds()), prompt, output)


def _azure_fields(line: str) -> tuple[datetime, int, int]:
    fields = line.strip().split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields, not 3")
    # Seven digits of a second's fraction; Python reads six.
    when = datetime.fromisoformat(fields[0][:26])
    return when, max(1, int(fields[1])), max(1, int(fields[2]))


def _number(document: _Document, name: str) -> float:
    value = document[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{name} is not a number")
    return float(value)


def _whole(document: _Document, name: str) -> int:
    value = document[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is not a whole number")
    return value


def _ids(document: _Document) -> list[int]:
    ids = document["hash_ids"]
    if not isinstance(ids, list) or not all(type(value) is int for value in ids):
        raise TypeError("hash_ids is not a list of whole numbers")
    return ids
