"""Requests of a file, sent unchanged: JSON lines of OpenAI bodies, or of OpenAI's batches.

A line is a body, or has it under `body`, next to its `url`. Next to the body there may be `timestamp` (its arrival, as
in traces), `session_id` (lines of one session are its turns, in their order) and `think_s` (the pause before the turn).
Lines are read when they are due: of a file only the places of its lines are in memory.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from loadtest.workloads.prompts import NO_GROUP, Endpoint, Prompt, Recorded, Source, Turn, WorkloadKind, WorkloadSpec

MOST_LINE_BYTES = 1 << 26
_MARKS = ("timestamp", "session_id", "think_s", "custom_id", "method", "url")
_FIELDS = {
    "messages": Endpoint.CHAT,
    "prompt": Endpoint.COMPLETIONS,
    "query": Endpoint.RERANK,
    "queries": Endpoint.SCORE,
    "text_1": Endpoint.SCORE,
}


class DatasetError(Exception):
    """A dataset that cannot be used; the message names the file, and the line where it has lines."""


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """One line: the request, and its recorded data."""

    recorded: Recorded
    at: float | None = None
    session: str | int | None = None
    _: KW_ONLY
    think_seconds: float | None = None


def parsed_line(line: bytes) -> RecordedLine:
    """Raises ValueError for an invalid line, with the reason."""
    document = orjson.loads(line)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    if str(document.get("method", "POST")).upper() != "POST":
        raise ValueError(f"method is {document['method']!r}; only POST can be sent")
    body = document["body"] if "body" in document else {k: v for k, v in document.items() if k not in _MARKS}
    if not isinstance(body, dict):
        raise ValueError("body is not a JSON object")
    endpoint = _endpoint_of(document.get("url"), body)
    session = document.get("session_id")
    if session is not None and not isinstance(session, str | int):
        raise ValueError("session_id is neither a text nor a whole number")
    return RecordedLine(
        Recorded(endpoint, body), _number(document, "timestamp"), session, think_seconds=_number(document, "think_s")
    )


def _endpoint_of(url: object, body: Mapping[str, Any]) -> Endpoint:
    if url is not None:
        path = "/" + urlsplit(str(url)).path.strip("/")
        known = [each for each in Endpoint if not each.takes_audio]
        found = next((each for each in known if path in (each.path, each.path.removeprefix("/v1"))), None)
        if found is None:
            raise ValueError(f"url {url!r} is none of {', '.join(each.path for each in known)}")
        return found
    for field, endpoint in _FIELDS.items():
        if field in body:
            if field == "messages" and not (isinstance(body[field], list) and body[field]):
                raise ValueError("messages is not a list of messages")
            return endpoint
    if "input" in body:
        items = body["input"]
        is_chat = "max_output_tokens" in body or (isinstance(items, list) and items and isinstance(items[0], dict))
        return Endpoint.RESPONSES if is_chat else Endpoint.EMBEDDINGS
    raise ValueError("no request: a body has messages, prompt, input, query or text_1, or it stands under `body`")


def _number(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is not a number from 0")
    return float(value)


def first_body(path: Path) -> Recorded | None:
    """The request of the first line; None for a file of another kind, such as a trace or ShareGPT's conversations."""
    try:
        with path.open("rb") as file:
            line = next((line for line in iter(lambda: file.readline(MOST_LINE_BYTES), b"") if line.strip()), b"")
        return parsed_line(line).recorded
    except (OSError, ValueError):
        return None


class BodyFile:
    """The lines of a file by number, and which of them are one conversation. Raises DatasetError."""

    def __init__(self, path: Path, *, check: bool = False) -> None:
        self.path = path
        self._numbers, self._starts, self._sizes = array("q"), array("q"), array("q")
        self.arrivals_seconds: Sequence[float] = ()
        self._conversations: list[array[int]] | None = None
        try:
            self._index(check=check)
        except OSError as error:
            raise DatasetError(f"{path}: {error.strerror or error}") from None

    def __len__(self) -> int:
        return len(self._starts) if self._conversations is None else len(self._conversations)

    def lines(self, index: int) -> Iterator[RecordedLine]:
        """The lines of a conversation, each read on demand."""
        places = (index,) if self._conversations is None else self._conversations[index]
        for place in places:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._starts[place])
                line = file.read(self._sizes[place])
            yield self._line(place, line)

    def _index(self, *, check: bool) -> None:
        times: array[float] = array("d")
        sessions: dict[str | int, array[int]] = {}
        grouped: list[array[int]] = []
        first: RecordedLine | None = None
        for line in self._scanned():
            place = len(self._starts) - 1
            if not (first is None or check or first.at is not None or first.session is not None):
                continue
            found = self._line(place, line)
            first = first or found
            if (found.at is None) != (first.at is None):
                raise DatasetError(f"{self.path}:{self._numbers[place]}: some lines have a timestamp, others have none")
            if found.at is not None:
                times.append(found.at)
            if found.session is None:
                grouped.append(array("q", [place]))
            elif found.session in sessions:
                sessions[found.session].append(place)
            else:
                sessions[found.session] = array("q", [place])
                grouped.append(sessions[found.session])
        if not self._starts:
            raise DatasetError(f"{self.path}: has no requests")
        if times:
            self._take_times(times, grouped)
        elif sessions:
            self._conversations = grouped

    def _take_times(self, times: array[float], grouped: list[array[int]]) -> None:
        """Milliseconds, or seconds where there are fractions, as in traces."""
        unit = 1.0 if any(not at.is_integer() for at in times) else 1e-3
        grouped.sort(key=lambda places: times[places[0]])
        origin = times[grouped[0][0]]
        self._conversations = grouped
        self.arrivals_seconds = array("d", ((times[places[0]] - origin) * unit for places in grouped))

    def _scanned(self) -> Iterator[bytes]:
        start = number = 0
        with self.path.open("rb") as file:
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    raise DatasetError(f"{self.path}:{number}: a line of more than {MOST_LINE_BYTES >> 20} MiB")
                if line.strip():
                    self._numbers.append(number)
                    self._starts.append(start)
                    self._sizes.append(len(line))
                    yield line
                start += len(line)

    def _line(self, place: int, line: bytes) -> RecordedLine:
        try:
            return parsed_line(line)
        except ValueError as error:
            raise DatasetError(f"{self.path}:{self._numbers[place]}: {error}") from None


class BodiesSource(Source):
    """The requests of a file, once each. Turns of a session get the answers of the turns before them.

    `split`: each line is a conversation, which is sent turn by turn up to each message of the assistant.
    """

    def __init__(self, spec: WorkloadSpec, *, split: bool = False) -> None:
        super().__init__(spec)
        if spec.file is None:
            raise DatasetError(f"--workload {WorkloadKind.BODIES}: give the file with --dataset or --trace")
        self._bodies = BodyFile(Path(spec.file.path))
        self._split = split
        self.count = len(self._bodies)
        self.arrivals_seconds = self._bodies.arrivals_seconds

    def turns(self, index: int) -> Iterator[Turn]:
        rng = random.Random(f"{self.spec.seed}-session-{index}")
        lines = self._bodies.lines(index)
        before: Sequence[Any] = ()
        places: tuple[int | None, ...] = ()
        for number, line in enumerate(_parts(lines) if self._split else lines):
            messages = line.recorded.fields.get("messages")
            messages = messages if isinstance(messages, list) else ()
            if number:
                places = _answer_places(places, before, messages)
            before = messages
            recorded = Recorded(line.recorded.endpoint, line.recorded.fields, places)
            yield Turn(
                Prompt(NO_GROUP, prefix="", tail="", max_tokens=0, recorded=recorded),
                self._pause(rng, number, line),
                remembers=True,
            )

    def _pause(self, rng: random.Random, number: int, line: RecordedLine) -> float:
        if not number:
            return 0.0
        if line.think_seconds is not None:
            return line.think_seconds
        return rng.expovariate(1 / self.spec.think_seconds) if self.spec.think_seconds else 0.0

    def warmup(self, index: int) -> Prompt:
        """A short prompt of made-up words: a prompt of the file would be cached."""
        return Prompt(NO_GROUP, prefix="", tail=self.distinct(f"warm-up {index}", self.spec.tail_tokens), max_tokens=8)


def _parts(lines: Iterator[RecordedLine]) -> Iterator[RecordedLine]:
    """Each conversation as requests for each of its answers, and for the one after its last message."""
    for line in lines:
        fields = line.recorded.fields
        messages = fields.get("messages")
        if not isinstance(messages, list):
            yield line
            continue
        answers = [place for place, message in enumerate(messages) if place and _is_answer(message)]
        ends = answers if answers and answers[-1] == len(messages) - 1 else [*answers, len(messages)]
        for start, end in pairwise([0, *ends]):
            if any(not _is_answer(message) for message in messages[start:end]):
                yield RecordedLine(Recorded(line.recorded.endpoint, {**fields, "messages": messages[:end]}))


def _answer_places(
    known: tuple[int | None, ...], before: Sequence[Any], messages: Sequence[Any]
) -> tuple[int | None, ...]:
    """For each earlier turn, the message that is its answer; None = keep the recorded one."""
    place = len(before)
    if not place or len(messages) <= place or list(messages[:place]) != list(before) or not _is_answer(messages[place]):
        return (None,) * (len(known) + 1)
    # Results of tools refer to the calls that were recorded.
    return (*known, None if messages[place].get("tool_calls") else place)


def _is_answer(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"
