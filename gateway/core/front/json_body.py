"""Checks and changes of a JSON body before it is parsed, so that no body can stop the event loop or mislead a backend.

A byte limit alone is not enough: 16 MiB of `{"a":{}},` takes seconds and 28 times its size to parse. So the limits of
objects, strings and values follow from `max_body_bytes`, and the memory of parsed values is reserved. One split of the
body at its quotation marks suffices: the text outside strings has every bracket and comma, and the strings show
duplicate keys. Every step costs a small constant a byte. Searches over a whole body are for single bytes: a search for
several can take 20 times as long over a text that is made for it, and blocks the interpreter.

Long work is done in steps, and the loop turns between them. Threads would not help: parsers and searches block the
interpreter for a whole step.

Fields that address the inside of an engine, or make it act for another client, are refused, and so are media by URL,
which a backend would fetch from inside its own network. docs/fields.md has the verdict on every field of vLLM's request
models. Form fields of audio uploads are not judged: uploads are passed on while they arrive.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import orjson

from gateway.config import ServerConfig
from gateway.core.errors import ContextTooComplex, InvalidRequest
from gateway.core.resources import Holding
from gateway.core.turns import Steps

SHORT_BYTES: Final = 16384  # a body of up to this size is read in one step, of 5 milliseconds at most

_PIECES_A_STEP = 32768  # an even number: outside and inside of strings
_MARKS_A_STEP = 131072
_VALUES_A_STEP: Final = 65536
_KEYS_A_STEP = 16384

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'{}[],:"'))
BACKSLASH, _QUOTE, _COLON, _OPENERS = ord("\\"), ord('"'), ord(":"), frozenset(b"{[")


def pieces_of(body: bytes) -> Steps[list[bytes]]:
    """The body split at the quotation marks where strings begin and end: outside and inside of strings by turns.

    Escaped quotation marks and backslashes are replaced, as by `without_escapes`. Invalid JSON gives some result.
    """
    if BACKSLASH in body:
        body = yield from without_escapes(body)
    return body.split(b'"')


def without_escapes(body: bytes, step_bytes: int = 1048576) -> Steps[bytes]:
    """The body with `\\n` for each escaped backslash and quotation mark: those left are where strings begin and end.

    A search for two bytes takes up to 7 ms per MiB of any body.
    """
    parts, start = [], 0
    while start < len(body):
        if start:
            yield
        part = body[start : start + step_bytes]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # it ends in the middle of an escape
            part = body[start : start + step_bytes + 1]
        parts.append(part.replace(b"\\\\", b"\\n").replace(b'\\"', b"\\n"))
        start += len(part)
    return b"".join(parts)


def marks_of(pieces: list[bytes]) -> Steps[bytes]:
    """The text outside strings, reduced to brackets, commas, colons and one quotation mark per string."""
    parts = []
    for start in range(0, len(pieces), _PIECES_A_STEP):
        if start:
            yield
        parts.append(b'"'.join(pieces[start : start + _PIECES_A_STEP : 2]).translate(None, _NOT_STRUCTURE))
    return b'"'.join(parts)


def top_level_keys(pieces: list[bytes]) -> Steps[list[int]]:
    """The places among the pieces of an object's keys at the top level."""
    keys: list[int] = []
    depth, string = 0, -1
    marks = (yield from marks_of(pieces)).translate(None, b",")
    for start in range(0, len(marks), _MARKS_A_STEP):
        if start:
            yield
        for mark in marks[start : start + _MARKS_A_STEP]:
            if mark == _QUOTE:
                string += 2
            elif mark == _COLON:
                if depth == 1:
                    keys.append(string)
            else:
                depth += 1 if mark in _OPENERS else -1
    return keys


def spelled_out(string: bytes) -> bytes:
    """The text of a string, which is valid JSON."""
    return string if BACKSLASH not in string else orjson.loads(b'"%b"' % string).encode()


_MEDIA: Final = frozenset(("image", "images", "audio", "audios", "video", "videos", "file", "files"))
_NAMED: Final = _MEDIA | {"data_format"}
_REMOTE_FORMATS = frozenset(("url", "path"))
_CALLS = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))
# Written by clients; engines pass it unchanged to templates and grammars.
_FOR_TOOLS = ("tools", "functions", "tool_choice", "arguments", "action")
_FOR_GRAMMARS = ("response_format", "structured_outputs", "guided_json", "output_config")
_FOR_TEMPLATES = ("metadata", "attributes", "annotations", "citations", "chat_template_kwargs")
_NOT_MEDIA: Final = frozenset((*_FOR_TOOLS, *_FOR_GRAMMARS, *_FOR_TEMPLATES))


def refuse_remote_media(
    document: dict[str, Any], left: list[Any], generates: bool, has_text_turns: bool = False
) -> None:
    """Raises InvalidRequest for an image, sound, video or file that is not in the request itself.

    The rule: wherever it stands, a field whose name ends in `url` or `urls` (`image_url`, or `url` of an Anthropic
    `source`) holds `data:` URLs only, and a field `image`, `audio`, `video` or `file` no other URL. No object has
    `data_format: url` or `path`, by which plugins of vLLM for /pooling fetch `data`. vLLM 0.20 to 0.33 fetches
    `image_url`, `audio_url` and `video_url` of content parts, in `messages`, in items of `input` and their outputs, and
    in scored texts, and the `url` of a `source`. The rule is wider, because new versions add names like these.

    Not checked are fields from which no engine reads media: tools and the arguments of their calls, output schemas,
    metadata, citations and the pages of a web search; and `documents`, where these are read by a chat template.
    `has_text_turns`: the `messages` are known to be a role and a text each.

    `left` begins as the document alone. A call takes a step's values from it, and adds their children.
    """
    room = _VALUES_A_STEP
    while left and room > 0:
        value, checked = left.pop(), ""  # the field name of this list, if its texts must be checked
        if type(value) is tuple:
            checked, value = value
        room -= len(value) + 1
        if type(value) is list:
            items: list[Any] = value
            if len(items) > _VALUES_A_STEP:
                left += [(checked, items[at : at + _VALUES_A_STEP]) for at in range(0, len(items), _VALUES_A_STEP)]
                continue
            for each in items:
                if type(each) is dict:
                    turn: dict[str, Any] = each
                    if len(turn) != 2 or "role" not in turn or type(turn.get("content")) is not str:
                        left.append(turn)  # not a message of text, as most are
                elif type(each) is list:
                    left.append(each)
                elif checked and type(each) is str:
                    _check(checked, each)
            continue
        fields: dict[str, Any] = value
        for name, inner in fields.items():
            kind = type(inner)
            if kind is str:
                if name.endswith("url") or name in _NAMED:
                    _check(name, inner)
            elif kind is dict:
                if name not in _NOT_MEDIA and not _is_given_as_it_is(name, fields, document):
                    left.append(inner)
            elif kind is list and name not in _NOT_MEDIA and not (name == "documents" and generates):
                if name == "messages" and has_text_turns:
                    continue
                left.append((name, inner) if name.endswith(("url", "rls")) or name in _NAMED else inner)


def _is_given_as_it_is(name: str, parent: dict[str, Any], document: dict[str, Any]) -> bool:
    """Whether an object is the arguments of a tool's call, or the format of the answer to a responses request."""
    return (name == "input" and parent.get("type") in _CALLS) or (name == "text" and parent is document)


def _check(name: str, text: str) -> None:
    if name == "data_format":
        remote = text.lower() in _REMOTE_FORMATS
    elif name in _MEDIA:
        remote = "://" in text[:64] and text[:5].lower() != "data:"
    else:
        remote = text != "" and text[:5].lower() != "data:"
    if remote:
        raise InvalidRequest(
            f"The field {name!r} must contain a data: URL. Fetching media by URL is disabled"
            " (server.allow_media_urls).",
            param=name,
        )


_SPACES = b" \t\r\n"


def with_fields(body: bytes, document: dict[str, Any], changes: dict[str, Any]) -> Steps[bytes]:
    """The body with top-level fields added or replaced. `document` is the body, parsed; none of them is there twice."""
    added = {name: value for name, value in changes.items() if name not in document}
    edits: list[tuple[int, int, bytes]] = []
    if added:
        end = body.rindex(b"}")
        edits.append((end, end, b"," + orjson.dumps(added)[1:-1] if document else orjson.dumps(added)[1:-1]))
    if len(added) < len(changes):
        pieces = yield from pieces_of(body)
        values = yield from _values(body, pieces, changes)
        edits += [(start, end, orjson.dumps(changes[name])) for name, start, end in values]
        edits.sort()
    parts: list[bytes | memoryview] = []
    view, done = memoryview(body), 0
    for start, end, text in edits:
        parts += (view[done:start], text)
        done = end
    parts.append(view[done:])
    return b"".join(parts)


def _values(body: bytes, pieces: list[bytes], names: Iterable[str]) -> Steps[list[tuple[str, int, int]]]:
    """The name of each of these fields that the body has, and from where to where its value goes."""
    keys = yield from top_level_keys(pieces)
    wanted = {name.encode(): name for name in names}
    found = []
    for number, (key, following) in enumerate(zip(keys, [*keys[1:], 0], strict=True), 1):
        if number % _KEYS_A_STEP == 0:
            yield
        name = wanted.get(spelled_out(pieces[key]))
        if name is not None:
            before = offset_of(pieces, key + 1)
            start, after = before + pieces[key + 1].index(b":") + 1, following - 1
            if following:
                end = before + offset_of(pieces, after, key + 1) + pieces[after].rindex(b",")
            else:
                end = body.rindex(b"}")
            value = body[start:end]
            start += len(value) - len(value.lstrip(_SPACES))
            end -= len(value) - len(value.rstrip(_SPACES))
            found.append((name, start, end))
            if len(pieces) > _PIECES_A_STEP:
                yield
    return found


def offset_of(pieces: list[bytes], place: int, since: int = 0) -> int:
    """Where a piece begins, counted from another one: each one before it is followed by a quotation mark."""
    return sum(map(len, pieces[since:place])) + place - since


# Duplicates of these at the top level are rejected: the backend could use the other one. docs/fields.md has the uses.
_PROMPTS = ("input", "instructions", "messages", "previous_input_messages", "prompt", "system", "tools")
_SCORED = ("data_1", "data_2", "documents", "items", "queries", "query", "text_1", "text_2", "top_n")
_AMOUNTS = ("best_of", "max_completion_tokens", "max_output_tokens", "max_tokens", "n")
_PLACES = ("cache_salt", "model", "previous_response_id", "prompt_cache_key", "vllm_xargs")
ACTED_ON = frozenset((*_PROMPTS, *_SCORED, *_AMOUNTS, *_PLACES, "background", "stream", "stream_options"))
REFUSED = {
    "request_id": "it could address another client's stored response; send the header X-Request-Id instead",
    "kv_transfer_params": "it makes the engine use other token ids than the prompt's and connect to any address",
    "ec_transfer_params": "like kv_transfer_params, for encoder caches",
    "prompt_embeds": "the engine would load a pickled tensor",
    "logits_processors": "the engine would run code by name",
    "api_base": "it makes a proxy behind the gateway use other credentials or addresses",
    "api_key": "it makes a proxy behind the gateway use other credentials or addresses",
    "base_url": "it makes a proxy behind the gateway use other credentials or addresses",
    "extra_headers": "it makes a proxy behind the gateway use other credentials or addresses",
    "user_config": "it makes a proxy behind the gateway use other credentials or addresses",
    "rid": "SGLang: like request_id",
    "bootstrap_host": "SGLang: address from which the engine fetches KV cache",
    "bootstrap_port": "SGLang: address from which the engine fetches KV cache",
    "bootstrap_room": "SGLang: KV cache that the engine fetches",
    "custom_logit_processor": "SGLang: the engine would run pickled code",
    "input_embeds": "SGLang: replaces the prompt",
    "disaggregated_params": "TensorRT-LLM: like kv_transfer_params",
}

_REFUSED = frozenset(REFUSED)
CLOSER_LOOK: Final = _REFUSED | {"vllm_xargs"}


def refuse_fields(document: dict[str, Any]) -> None:
    """Raises InvalidRequest for a field that is refused, at the top level or in `vllm_xargs`."""
    for fields in (document, document.get("vllm_xargs")):
        if type(fields) is dict and (refused := _REFUSED.intersection(fields)):
            name = min(refused)
            raise InvalidRequest(f"Unsupported field {name!r}: {REFUSED[name]}.", param=name)


_LISTS_OF_NUMBERS = re.compile(rb"\[,*\]")
# The memory of a parsed value, besides the text of strings.
_CONTAINER_BYTES, _STRING_BYTES, _VALUE_BYTES = 200, 64, 36
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_SQUARE = bytes.maketrans(b"{}", b"[]")
_SPELLINGS = frozenset(name.encode() for name in ACTED_ON)
_LONGEST_BYTES = 6 * max(map(len, ACTED_ON))  # of a key that is spelled with escapes only


# A session of an agent has a container in 60 bytes, a string in 14, and fewer keys than half of its strings.
_BYTES_A_CONTAINER, _BYTES_A_STRING, _BYTES_A_VALUE = 48, 12, 16
MOST_KEYS: Final = 131072  # of one object, which is read in one step
_LEAST_CONTAINERS, _LEAST_STRINGS, _LEAST_VALUES = 16384, 65536, 262144


class JsonLimits:
    """How much of each kind a body may have."""

    __slots__ = ("containers", "depth", "short_bytes", "strings", "values")

    def __init__(self, server: ServerConfig) -> None:
        size_bytes, self.depth = server.max_body_bytes, server.max_json_depth
        self.containers = server.max_json_containers or max(_LEAST_CONTAINERS, size_bytes // _BYTES_A_CONTAINER)
        self.strings = server.max_json_strings or max(_LEAST_STRINGS, size_bytes // _BYTES_A_STRING)
        self.values = server.max_json_values or max(_LEAST_VALUES, size_bytes // _BYTES_A_VALUE)
        # up to this size `json_object` may read a body: none has more containers, strings or values than bytes
        self.short_bytes = min(SHORT_BYTES, self.containers, self.strings, self.values)


def parse_body(body: bytes, limits: JsonLimits, holding: Holding | None = None) -> Steps[dict[str, Any]]:
    """The body as a JSON object, whose memory is reserved in `holding`. Most bodies need `json_object` only.

    Raises InvalidRequest with the reason, ContextTooComplex or MemoryFull.
    """
    most, long = limits.strings, len(body) > SHORT_BYTES
    strings = body
    if len(body) > 2 * most and body.count(b'"') > 2 * most:
        strings = yield from without_escapes(body)
        if strings.count(b'"') > 2 * most:
            raise ContextTooComplex.of(most, "strings (server.max_json_strings)")
    pieces = strings.split(b'"')
    has_escapes = strings is body and BACKSLASH in body
    containers = body.count(b"{") + body.count(b"[")
    has_shape = len(body) > min(limits.values, 4 * MOST_KEYS) or containers > min(limits.depth, limits.containers)
    if holding is not None and long:
        holding.add(_CONTAINER_BYTES * containers + _STRING_BYTES * len(pieces) // 2 + _VALUE_BYTES * body.count(b","))
    if long:
        yield
    may_repeat = yield from _may_have_a_key_twice(pieces)
    if has_escapes and (has_shape or may_repeat):
        if long:
            yield
        pieces = yield from pieces_of(body)
    if has_shape:
        if long:
            yield
        marks = yield from marks_of(pieces)
        if long:
            yield
        yield from _check_shape(marks, limits)
    if long:
        yield
    try:
        document = yield from loaded(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    if type(document) is not dict:
        raise InvalidRequest("The body must be a JSON object.")
    if long:
        yield
    if may_repeat and (duplicate := (yield from _duplicate_key(pieces))):
        raise InvalidRequest(f"Duplicate key {duplicate!r}.", param=duplicate)
    if not CLOSER_LOOK.isdisjoint(document):
        refuse_fields(document)
    return document


_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_LOAD_BYTES = 524288  # per step: of short strings, these take 10 ms
_FIELD_BYTES, _ITEM_BYTES = 32, 4  # text that takes as long as the rest of a short string
_PLAIN = b"0123456789.+-eE, \t\r\nnulltruefalse"  # characters of numbers, null, true and false


def loaded(text: bytes) -> Steps[Any]:
    """The value of a JSON text; a long object or list is read piece by piece. Raises JSONDecodeError."""
    start = text[:64].lstrip()[:1]
    if len(text) <= _LOAD_BYTES or start not in (b"{", b"["):
        return orjson.loads(text)
    yield
    try:
        if start == b"{":
            found, size_bytes = {}, 0
            for name, raw in _FIELDS.decode(text).items():
                if size_bytes > _LOAD_BYTES:
                    yield
                    size_bytes = 0
                size_bytes += len(raw) + _FIELD_BYTES
                found[name] = orjson.loads(bytes(raw)) if len(raw) <= _LOAD_BYTES else (yield from loaded(bytes(raw)))
            return found
        if text.translate(None, _PLAIN) != b"[]":
            return (yield from _items(_ITEMS.decode(text)))
    except msgspec.DecodeError as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from error
    yield
    return (yield from _plain(text))


def _items(items: list[msgspec.Raw]) -> Steps[list[Any]]:
    found: list[Any] = []
    some: list[msgspec.Raw] = []
    size_bytes = 0
    for raw in items:
        if len(raw) > _LOAD_BYTES:
            found += orjson.loads(b"[%b]" % b",".join(some))
            found.append((yield from loaded(bytes(raw))))
            some, size_bytes = [], 0
            continue
        some.append(raw)
        size_bytes += len(raw) + _ITEM_BYTES
        if size_bytes > _LOAD_BYTES:
            yield
            found += orjson.loads(b"[%b]" % b",".join(some))
            some, size_bytes = [], 0
    found += orjson.loads(b"[%b]" % b",".join(some))
    return found


def _plain(text: bytes) -> Steps[list[Any]]:
    found: list[Any] = []
    start, last = text.index(b"[") + 1, text.rindex(b"]")
    while (end := text.find(b",", start + _LOAD_BYTES, last)) >= 0:
        found += orjson.loads(b"[%b]" % text[start:end])
        start = end + 1
        yield
    found += orjson.loads(b"[%b]" % text[start:last])
    return found


def _check_shape(marks: bytes, limits: JsonLimits) -> Steps[None]:
    """Bounds on objects, arrays, values and nesting."""
    containers = marks.count(b"{") + marks.count(b"[")
    if containers > limits.containers:
        raise ContextTooComplex.of(limits.containers, "objects and arrays (server.max_json_containers)")
    values = marks.count(b",") if len(marks) > limits.values else 0
    if values > limits.values and _LISTS_OF_NUMBERS.sub(b"", marks).count(b",") > limits.values:
        raise ContextTooComplex.of(limits.values, "values (server.max_json_values)")
    keys = marks.count(b":")
    if keys > limits.strings // 2:
        raise ContextTooComplex.of(limits.strings // 2, "keys (half of server.max_json_strings)")
    if keys > MOST_KEYS and (yield from _has_object_of_many_keys(marks)):
        raise ContextTooComplex.of(MOST_KEYS, "keys in one object")
    if containers > limits.depth:
        if marks.count(b"}") + marks.count(b"]") != containers:
            raise InvalidRequest("The body is not valid JSON: unbalanced brackets.")
        if _is_deeper(marks, limits.depth):
            raise ContextTooComplex.of(limits.depth, "nesting levels (server.max_json_depth)")


def _has_object_of_many_keys(marks: bytes) -> Steps[bool]:
    marks, around, keys = marks.translate(None, b'[],"'), list[int](), 0
    for start in range(0, len(marks), _MARKS_A_STEP):
        yield
        for mark in marks[start : start + _MARKS_A_STEP]:
            if mark == _COLON:
                keys += 1
                if keys > MOST_KEYS:
                    return True
            elif mark in _OPENERS:
                around.append(keys)
                keys = 0
            else:
                keys = around.pop() if around else 0
    return False


def _is_deeper(marks: bytes, levels: int) -> bool:
    """Whether brackets are left after removing the innermost pairs `levels` times.

    Brackets and braces count as one kind: the parser finds mismatches. Their numbers are equal.
    """
    brackets = marks.translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(levels):
        brackets = brackets.replace(b"[]", b"")
    return b"[]" in brackets


def _may_have_a_key_twice(pieces: list[bytes]) -> Steps[bool]:
    """Whether a name of ACTED_ON stands in quotation marks twice, or a short string has escapes that can spell one.

    These need not be keys of the top level: they can be values, or keys of nested objects.
    """
    seen = set()
    for start in range(0, len(pieces), _PIECES_A_STEP):
        if start:
            yield
        for piece in pieces[start : start + _PIECES_A_STEP]:
            if len(piece) > _LONGEST_BYTES:
                continue
            if piece in _SPELLINGS:
                if piece in seen:
                    return True
                seen.add(piece)
            elif BACKSLASH in piece and b"\\u" in piece:
                return True
    return False


def _duplicate_key(pieces: list[bytes]) -> Steps[str | None]:
    """A field that the gateway acts on and that occurs twice at the top level, in any spelling."""
    seen = set()
    for number, place in enumerate((yield from top_level_keys(pieces)), 1):
        if number % _KEYS_A_STEP == 0:
            yield
        key = pieces[place]
        if len(key) <= _LONGEST_BYTES and (name := spelled_out(key)) in _SPELLINGS:
            if name in seen:
                return name.decode()
            seen.add(name)
    return None
