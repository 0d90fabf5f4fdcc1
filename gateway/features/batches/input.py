"""The input file of a batch: checked line by line, and indexed by offset and length; its text is never held as a whole.

All of this runs in a thread. `breathe` is called often, so that the event loop gets the interpreter in between.
"""

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, BinaryIO, NamedTuple, get_args

import orjson

from gateway._native import json_object, prefix_keys
from gateway.config import ServerConfig
from gateway.core.errors import InvalidRequest
from gateway.core.front.json_body import JsonLimits, parse_body
from gateway.core.routing.prompt_blocks import canonical_prompt, inputs_of
from gateway.features.batches.batch import batch_error
from gateway.features.batches.documents import Endpoint
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


class LineIndex:
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

    def __getitem__(self, place: int) -> Line:
        return Line(place, self._offsets[place], self._lengths[place])


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
    """A valid file: its index, its lines' prefixes, and its model."""

    index: LineIndex = field(default_factory=LineIndex)
    order: PrefixOrder = field(default_factory=PrefixOrder)
    model: str = ""

    def part(self, first: int, end: int) -> "CheckedInput":
        """Some of the lines, whose places are counted from 0 again. All of them are not copied."""
        if (first, end) == (0, len(self.index)):
            return self
        return CheckedInput(self.index.part(first, end), self.order.part(first, end), self.model)


def check_input(source: BinaryIO, endpoint: str, limits: InputLimits, breathe: Breathe) -> CheckedInput:
    """Check a file from its beginning. Raises InvalidInput with all its errors, up to a bound; or OSError."""
    return _Check(endpoint, limits, breathe).run(source)


@dataclass(slots=True)
class _Check:
    """One check of a file, and what is known of it so far."""

    endpoint: str
    limits: InputLimits
    breathe: Breathe
    _: KW_ONLY
    checked: CheckedInput = field(default_factory=CheckedInput)
    errors: list[dict[str, Any]] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)  # hashes of custom ids
    embedding_inputs: int = 0

    def run(self, source: BinaryIO) -> CheckedInput:
        checked, errors = self.checked, self.errors
        source.seek(0)
        for number, offset, line in self._lines(source):
            self.breathe()
            if (wrong := self._problem(line)) is None:
                checked.index.add(offset, len(line))
            else:
                code, message, param = wrong
                errors.append(batch_error(code, message, number, param))
                if len(errors) >= _MOST_ERRORS:
                    break
        if not errors and not len(checked.index):
            errors.append(batch_error("empty_file", "The input file has no requests."))
        if errors:
            raise InvalidInput(errors)
        return checked

    def _lines(self, source: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
        """Number, offset and text of each line that is not blank. What ends the file early is added to the errors."""
        most, most_lines, offset, requests = self.limits.max_line_bytes, self.limits.max_lines, 0, 0
        for number in range(1, 2 * most_lines + 2):
            line = source.readline(most + 1)
            if not line:
                return
            if len(line) > most and not line.endswith(b"\n"):
                message = f"The line exceeds the limit of {most} bytes."
                self.errors.append(batch_error("line_too_long", message, number))
                return
            start = len(_BYTE_ORDER_MARK) if number == 1 and line.startswith(_BYTE_ORDER_MARK) else 0
            if text := line[start:].strip():
                requests += 1
                if requests > most_lines:
                    break
                yield number, offset + line.index(text), text
            offset += len(line)
        else:
            number += 1
        message = f"The input file exceeds the limit of {most_lines} requests (batches.max_lines)."
        self.errors.append(batch_error("too_many_requests_in_file", message, number))

    def _problem(self, line: bytes) -> tuple[str, str, str | None] | None:
        """Code, message and field of what is wrong with a line; None = nothing. It is noted then."""
        endpoint, checked = self.endpoint, self.checked
        try:
            request = self._parsed(line)
        except InvalidRequest as error:
            return "invalid_json_line", f"The line is not a valid JSON object: {error.message}", None
        custom_id, body, url = request.get("custom_id"), request.get("body"), request.get("url")
        if type(custom_id) is not str or not 0 < len(custom_id) <= _MOST_ID_LENGTH:
            return "invalid_custom_id", f"custom_id must be a string of 1 to {_MOST_ID_LENGTH} characters.", "custom_id"
        if request.get("method", "POST") != "POST":
            return "invalid_method", "method must be POST.", "method"
        if url != endpoint:
            known = type(url) is str and url in get_args(Endpoint)
            reason = f"the batch's endpoint, {endpoint}" if known else f"a supported endpoint, here {endpoint}"
            return ("mismatched_endpoint" if known else "invalid_url"), f"url must be {reason}.", "url"
        if type(body) is not dict:
            return "invalid_body", "body must be a JSON object.", "body"
        model = body.get("model")
        if type(model) is not str or not model:
            return "missing_model", "body.model must be the name of a model.", "body.model"
        if checked.model and model != checked.model:
            message = f"All requests of a file must have the same model ({checked.model[:200]})."
            return "mismatched_model", message, "body.model"
        for name in ("stream", "background"):
            if body.get(name):
                return f"{name}_not_supported", f"body.{name} must be false in a batch.", f"body.{name}"
        if (known_by := hash(custom_id)) in self.ids:
            return "duplicate_custom_id", f"custom_id {custom_id[:100]!r} is used more than once.", "custom_id"
        self.ids.add(known_by)
        if endpoint == "/v1/embeddings":
            self.embedding_inputs += inputs_of(body)
            if self.embedding_inputs > (most := self.limits.max_embedding_inputs):
                message = (
                    f"The requests of a file must not have more than {most} inputs (batches.max_embedding_inputs)."
                )
                return "too_many_embedding_inputs", message, "body.input"
        checked.model = model
        _add_to_order(checked.order, body, _PROMPTS.get(endpoint), len(line))
        return None

    def _parsed(self, line: bytes) -> dict[str, Any]:
        """Raises InvalidRequest if the line is not a JSON object within the limits of a request's body."""
        limits = self.limits.json
        found = json_object(line, limits.depth) if len(line) <= limits.short_bytes else None
        if found is not None:
            return found
        steps = parse_body(line, limits)
        while True:
            self.breathe()
            try:
                next(steps)
            except StopIteration as end:
                parsed: dict[str, Any] = end.value
                return parsed


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


def read_lines(source: BinaryIO, lines: Sequence[Line]) -> list[LineRequest]:
    """What each of these lines requests, in their order. They may be read while the file is checked again."""
    found = []
    for line in lines:
        request = orjson.loads(os.pread(source.fileno(), line.length, line.offset))
        document = request["body"]
        found.append(LineRequest(line, request["custom_id"], orjson.dumps(document), document))
    return found
