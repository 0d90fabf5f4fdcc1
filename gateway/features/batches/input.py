"""The input file of a batch: checked line by line, and indexed by offset and length; its text is never held as a whole.

All of this runs in a thread. `breathe` is called often, so that the event loop gets the interpreter in between.
"""

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, BinaryIO, NamedTuple, overload

import orjson

from gateway._native import json_object, prefix_keys
from gateway.config import ServerConfig
from gateway.core.errors import InvalidRequest
from gateway.core.front.json_body import JsonLimits, parse_body
from gateway.core.routing.prompt_blocks import canonical_prompt, inputs_of
from gateway.core.threads import Threads
from gateway.features.batches.batch import ENDPOINTS, batch_error
from gateway.features.batches.order import PrefixOrder
from gateway.features.batches.settings import BatchesConfig

_MOST_ERRORS = 100  # reported of one file
_MOST_ID_LENGTH = 512
_ENVELOPE_BYTES = 8192  # of a line, besides the body
_PROMPTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
_BYTES_PER_TOKEN = 4  # about
_OUTPUT_TOKENS, _MOST_OUTPUT_TOKENS = 256, 4096  # expected: of a request without a limit, and with a high one
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Breathe = Callable[[], None]


class InvalidInput(Exception):
    """The input file is refused. `errors`: in OpenAI's form, each with its line."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__(errors[0]["message"])
        self.errors = errors


class Line(NamedTuple):
    """Where one request of an input file is. `place`: among the requests of the file, from 0."""

    place: int
    offset: int
    length: int


class LineRequest(NamedTuple):
    """What a line requests. `document` is the body, parsed."""

    line: Line
    custom_id: str
    body: bytes
    document: dict[str, Any]


class LineIndex(Sequence[Line]):
    """The lines of a file in its order: 12 bytes each."""

    def __init__(self) -> None:
        self._offsets = array("Q")
        self._lengths = array("L")

    def add(self, offset: int, length: int) -> None:
        self._offsets.append(offset)
        self._lengths.append(length)

    def part(self, first: int, end: int) -> "LineIndex":
        """Some of the lines, whose places are counted from 0 again."""
        part = LineIndex()
        part._offsets, part._lengths = self._offsets[first:end], self._lengths[first:end]
        return part

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, place: int) -> Line: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Line]: ...
    def __getitem__(self, place: int | slice) -> Line | Sequence[Line]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        return Line(range(len(self))[place], self._offsets[place], self._lengths[place])


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What one file may have, and how large and deep one line may be."""

    max_lines: int
    max_embedding_inputs: int
    max_line_bytes: int
    _: KW_ONLY
    json: JsonLimits

    @classmethod
    def of(cls, batches: BatchesConfig, server: ServerConfig) -> "InputLimits":
        return cls(
            batches.max_lines,
            batches.max_embedding_inputs,
            server.max_body_bytes + _ENVELOPE_BYTES,
            json=JsonLimits(server),
        )


@dataclass(slots=True)
class CheckedInput:
    """A valid file: its index, its lines' prefixes, its model, and each custom id's hash with the place of its line."""

    index: LineIndex = field(default_factory=LineIndex)
    order: PrefixOrder = field(default_factory=PrefixOrder)
    _: KW_ONLY
    embedding_inputs: int = 0
    model: str = ""
    places: dict[int, int] = field(default_factory=dict)

    def part(self, first: int, end: int) -> "CheckedInput":
        """Some of the lines, whose places are counted from 0 again. All of them are not copied."""
        if (first, end) == (0, len(self.index)):
            return self
        return CheckedInput(self.index.part(first, end), self.order.part(first, end), model=self.model)


def parse_line(line: bytes, limits: InputLimits, breathe: Breathe) -> dict[str, Any]:
    """Raises InvalidRequest if the line is not a JSON object within the limits of a request's body."""
    found = json_object(line, limits.json.depth) if len(line) <= limits.json.short_bytes else None
    if found is not None:
        return found
    steps = parse_body(line, limits.json)
    while True:
        breathe()
        try:
            next(steps)
        except StopIteration as end:
            parsed: dict[str, Any] = end.value
            return parsed


def check_input(source: BinaryIO, endpoint: str, limits: InputLimits, breathe: Breathe) -> CheckedInput:
    """Check a file from its beginning. Raises InvalidInput with all its errors, up to a bound; or OSError."""
    checked, errors = CheckedInput(), list[dict[str, Any]]()
    source.seek(0)
    for number, offset, line in _lines(source, limits, errors):
        breathe()
        found = _check(line, endpoint, limits, checked, breathe)
        if found is None:
            checked.index.add(offset, len(line))
        else:
            errors.append(batch_error(found[0], found[1], number, found[2]))
            if len(errors) >= _MOST_ERRORS:
                break
    if not errors and not len(checked.index):
        errors.append(batch_error("empty_file", "The input file has no requests."))
    if errors:
        raise InvalidInput(errors)
    return checked


def _lines(source: BinaryIO, limits: InputLimits, errors: list[dict[str, Any]]) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and text of each line that is not blank. What ends the file early is added to `errors`."""
    most, offset, requests = limits.max_line_bytes, 0, 0
    for number in range(1, 2 * limits.max_lines + 2):
        line = source.readline(most + 1)
        if not line:
            return
        if len(line) > most and not line.endswith(b"\n"):
            errors.append(batch_error("line_too_long", f"The line exceeds the limit of {most} bytes.", number))
            return
        start = len(_BYTE_ORDER_MARK) if number == 1 and line.startswith(_BYTE_ORDER_MARK) else 0
        if text := line[start:].strip():
            requests += 1
            if requests > limits.max_lines:
                break
            yield number, offset + line.index(text), text
        offset += len(line)
    else:
        number += 1
    message = f"The input file exceeds the limit of {limits.max_lines} requests (batches.max_lines)."
    errors.append(batch_error("too_many_requests_in_file", message, number))


def _check(
    line: bytes, endpoint: str, limits: InputLimits, checked: CheckedInput, breathe: Breathe
) -> tuple[str, str, str | None] | None:
    """Code, message and field of what is wrong with a line; None = nothing. A valid one's id and model are noted."""
    try:
        request = parse_line(line, limits, breathe)
    except InvalidRequest as error:
        return "invalid_json_line", f"The line is not a valid JSON object: {error.message}", None
    custom_id, body, url = request.get("custom_id"), request.get("body"), request.get("url")
    if type(custom_id) is not str or not 0 < len(custom_id) <= _MOST_ID_LENGTH:
        return "invalid_custom_id", f"custom_id must be a string of 1 to {_MOST_ID_LENGTH} characters.", "custom_id"
    if request.get("method", "POST") != "POST":
        return "invalid_method", "method must be POST.", "method"
    if url != endpoint:
        known = type(url) is str and url in ENDPOINTS
        reason = f"the batch's endpoint, {endpoint}" if known else f"a supported endpoint, here {endpoint}"
        return ("mismatched_endpoint" if known else "invalid_url"), f"url must be {reason}.", "url"
    if type(body) is not dict:
        return "invalid_body", "body must be a JSON object.", "body"
    model = body.get("model")
    if type(model) is not str or not model:
        return "missing_model", "body.model must be the name of a model.", "body.model"
    if checked.model and model != checked.model:
        return (
            "mismatched_model",
            f"All requests of a file must have the same model ({checked.model[:200]}).",
            "body.model",
        )
    for name in ("stream", "background"):
        if body.get(name):
            return f"{name}_not_supported", f"body.{name} must be false in a batch.", f"body.{name}"
    places = checked.places
    if places.setdefault(hash(custom_id), len(places)) != len(places) - 1 or len(places) - 1 != len(checked.index):
        return "duplicate_custom_id", f"custom_id {custom_id[:100]!r} is used more than once.", "custom_id"
    if endpoint == "/v1/embeddings":
        checked.embedding_inputs += inputs_of(body)
        if checked.embedding_inputs > limits.max_embedding_inputs:
            most = limits.max_embedding_inputs
            return (
                "too_many_embedding_inputs",
                f"The requests of a file must not have more than {most} inputs (batches.max_embedding_inputs).",
                "body.input",
            )
    checked.model = model
    _add_to_order(checked.order, body, _PROMPTS.get(endpoint), len(line))
    return None


def _add_to_order(order: PrefixOrder, body: dict[str, Any], field: str | None, size_bytes: int) -> None:
    """Note a line's prefix. Only the order of keys matters, so that the chain begins anywhere."""
    if field is None:  # it generates nothing: no prefix is reused
        order.add((), size_bytes // _BYTES_PER_TOKEN, 0)
        return
    keys, _, _ = prefix_keys(canonical_prompt(body, field).pieces, 0)
    limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")]
    given = [limit for limit in limits if type(limit) is int and limit >= 0]
    output_tokens = min([*given[:1], _MOST_OUTPUT_TOKENS]) if given else _OUTPUT_TOKENS
    order.add(keys, size_bytes // _BYTES_PER_TOKEN, output_tokens)


class InputFile:
    """An input file, to be checked and read in a thread; lines may be read while it is checked again."""

    def __init__(self, source: BinaryIO, threads: Threads) -> None:
        self.source = source
        self._threads = threads

    async def requests(self, lines: Sequence[Line]) -> list[LineRequest]:
        """As `read`, outside of a thread."""
        return await self._threads.run(self.read, lines)

    def read(self, lines: Sequence[Line]) -> list[LineRequest]:
        """What each of these lines requests, in their order."""
        found = []
        for line in lines:
            request = orjson.loads(os.pread(self.source.fileno(), line.length, line.offset))
            document = request["body"]
            found.append(LineRequest(line, request["custom_id"], orjson.dumps(document), document))
        return found

    def close(self) -> None:
        """Close the file in a thread: another one may still read it."""
        self._threads.later(self.source.close)
