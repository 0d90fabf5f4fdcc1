"""Checks and changes of a JSON body before it is parsed, so that no body can stop the event loop or mislead a backend.

A byte limit alone is not enough: 16 MiB of `{"a":{}},` takes seconds and 28 times its size to parse. Splitting the body
at its quotation marks, once, gives all that is needed: the text outside strings has every bracket and comma, and the
strings show duplicate keys. Every step costs a small constant a byte. Searches over a whole body are for single bytes:
a search for several can take 20 times as long over a text that is made for it, and blocks the interpreter.

Long work is done in steps, and the loop turns between them. Threads would not help: parsers and searches block the
interpreter for a whole step.

Fields that address the inside of an engine, or make it act for another client, are refused, and so are media by URL,
which a backend would fetch from inside its own network. docs/fields.md has the verdict on every field of vLLM's request
models. Form fields of audio uploads are not judged: uploads are passed on while they arrive.
"""

import asyncio
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, TypeVar

import orjson

from gateway.config import ServerConfig
from gateway.errors import InvalidRequest

SHORT_BYTES = 16384  # a body of up to this size is read in one step, of 5 milliseconds at most
Result = TypeVar("Result")
Steps = Generator[None, None, Result]


def at_once(steps: Steps[Result]) -> Result:
    """The result of the work, done in one go."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


async def in_turns(steps: Steps[Result]) -> Result:
    """The result of the work; the event loop has two turns after each step.

    In the first it reads what others have sent, in the second it answers them.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            await _others()
            result: Result = end.value
            return result
        await _others()


async def _others() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


_MANY_MARKS = 131072  # in a body with more, escaped ones are replaced before: each piece is an object of 40 bytes
_RUN = b"\\" * 4096  # of even length
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'{}[],:"'))
BACKSLASH, _QUOTE, _COLON, _OPENERS = ord("\\"), ord('"'), ord(":"), frozenset(b"{[")


class Layout(NamedTuple):
    """Where a body's strings are.

    `pieces` alternate between outside and inside strings. An escaped quotation mark is replaced by `\\n`, which is as
    long; an escaped backslash may be.
    """

    pieces: list[bytes]

    def marks(self) -> bytes:
        """The text outside strings, reduced to brackets, commas, colons and one quotation mark per string."""
        return b'"'.join(self.pieces[::2]).translate(None, _NOT_STRUCTURE)

    def offset(self, place: int) -> int:
        """Where a piece begins in the body: each one before it is followed by a quotation mark."""
        return sum(map(len, self.pieces[:place])) + place

    def top_level_keys(self) -> list[int]:
        """The places among the pieces of an object's keys at the top level."""
        keys: list[int] = []
        depth, string = 0, -1
        for mark in self.marks().translate(None, b","):
            if mark == _QUOTE:
                string += 2
            elif mark == _COLON:
                if depth == 1:
                    keys.append(string)
            else:
                depth += 1 if mark in _OPENERS else -1
        return keys


def layout_of(body: bytes) -> Steps[Layout]:
    """The body split at its quotation marks. Invalid JSON gives some result, in the same time."""
    if len(body) > _MANY_MARKS and body.count(b'"') > _MANY_MARKS:
        body = yield from without_escapes(body)
    pieces = body.split(b'"')
    if BACKSLASH in body:
        escaping = [
            place
            for place, piece in enumerate(pieces)
            if piece and piece[-1] == BACKSLASH and (piece[-2:-1] != b"\\" or _ends_in_an_escape(piece))
        ]
        if escaping:
            yield
            pieces = _whole_strings(pieces, escaping)
    return Layout(pieces)


def without_escapes(body: bytes, step_bytes: int = 2097152) -> Steps[bytes]:
    """The body with `\\n` for each escaped backslash and quotation mark: those left are where strings begin and end.

    A search for two bytes takes up to 7 ms per MiB of any body.
    """
    parts, start = [], 0
    while start < len(body):
        if start:
            yield
        part = body[start : start + step_bytes]
        if _ends_in_an_escape(part):
            part = body[start : start + step_bytes + 1]
        parts.append(part.replace(b"\\\\", b"\\n").replace(b'\\"', b"\\n"))
        start += len(part)
    return b"".join(parts)


def _whole_strings(pieces: list[bytes], escaping: list[int]) -> list[bytes]:
    """The pieces after a split at real quotation marks alone; those `escaping` end in the escape of a mark."""
    marks = [b'"'] * len(pieces)
    for place in escaping:
        marks[place] = b"n"
    marks[-1] = b""
    both = [b""] * (2 * len(pieces))
    both[::2], both[1::2] = pieces, marks
    return b"".join(both).split(b'"')


def _ends_in_an_escape(piece: bytes) -> bool:
    """Whether an odd number of backslashes is at the end. By blocks, because `rstrip` looks at each byte by itself."""
    end = len(piece)
    while piece.endswith(_RUN, 0, end):
        end -= len(_RUN)
    tail = piece[max(0, end - len(_RUN)) : end]
    return (len(tail) - len(tail.rstrip(b"\\"))) % 2 == 1


def spelled_out(string: bytes) -> bytes:
    """The text of a string, which is valid JSON."""
    return string if BACKSLASH not in string else orjson.loads(b'"%b"' % string).encode()


_MEDIA = frozenset(("image", "images", "audio", "audios", "video", "videos", "file", "files"))
_NAMED = _MEDIA | {"data_format"}
_REMOTE_FORMATS = frozenset(("url", "path"))
_CALLS = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))
# Written by clients; engines pass it unchanged to templates and grammars.
_NOT_MEDIA = frozenset(
    ("tools", "functions", "metadata", "response_format", "structured_outputs", "guided_json", "output_config",
     "tool_choice", "attributes", "arguments", "annotations", "citations", "action", "chat_template_kwargs")
)  # fmt: skip


def refuse_remote_media(document: dict[str, Any], *, generates: bool) -> None:
    """Raises InvalidRequest for an image, sound, video or file that is not in the request itself.

    The rule: wherever it stands, a field whose name ends in `url` or `urls` (`image_url`, or `url` of an Anthropic
    `source`) holds `data:` URLs only, and a field `image`, `audio`, `video` or `file` no other URL. No object has
    `data_format: url` or `path`, by which plugins of vLLM for /pooling fetch `data`. vLLM 0.20 to 0.33 fetches
    `image_url`, `audio_url` and `video_url` of content parts, in `messages`, in items of `input` and their outputs, and
    in what is scored, and the `url` of a `source`. The rule is wider, because new versions add names like these.

    Not checked is what no engine reads media from: tools and the arguments of their calls, output schemas, metadata,
    citations and the pages of a web search; and `documents`, where these are read by a chat template.
    """
    left: list[Any] = [document]
    while left:
        value = left.pop()
        if type(value) is list:
            left += [each for each in value if (type(each) is dict and not _is_plain(each)) or type(each) is list]
            continue
        for name, inner in value.items():
            kind = type(inner)
            if kind is str:
                if name[-3:] == "url" or name in _NAMED:
                    _check(name, inner)
            elif kind is dict:
                if name not in _NOT_MEDIA and not _is_given_as_it_is(name, value, document):
                    left.append(inner)
            elif kind is list and name not in _NOT_MEDIA and not (name == "documents" and generates):
                left.append(inner)
                if name[-3:] in ("url", "rls") or name in _NAMED:
                    for each in inner:
                        if type(each) is str:
                            _check(name, each)


def _is_plain(turn: dict[str, Any]) -> bool:
    """Whether it is a message of text, as most are: role and content, and nothing else."""
    return len(turn) == 2 and type(turn.get("content")) is str and "role" in turn


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
        layout = yield from layout_of(body)
        edits += [(start, end, orjson.dumps(changes[name])) for name, start, end in _values(body, layout, changes)]
        edits.sort()
    parts: list[bytes | memoryview] = []
    view, done = memoryview(body), 0
    for start, end, text in edits:
        parts += (view[done:start], text)
        done = end
    parts.append(view[done:])
    return b"".join(parts)


def _values(body: bytes, layout: Layout, names: Iterable[str]) -> list[tuple[str, int, int]]:
    """The name of each of these fields that the body has, and from where to where its value goes."""
    pieces, keys = layout.pieces, layout.top_level_keys()
    wanted = {name.encode(): name for name in names}
    found = []
    for key, following in zip(keys, [*keys[1:], 0], strict=True):
        name = wanted.get(spelled_out(pieces[key]))
        if name is not None:
            start = layout.offset(key + 1) + pieces[key + 1].index(b":") + 1
            after = following - 1
            end = layout.offset(after) + pieces[after].rindex(b",") if following else body.rindex(b"}")
            value = body[start:end]
            start += len(value) - len(value.lstrip(_SPACES))
            end -= len(value) - len(value.rstrip(_SPACES))
            found.append((name, start, end))
    return found


# Duplicates of these at the top level are rejected: the backend could use the other one.
ACTED_ON = {
    "model": "selects the backends; aliases are replaced",
    "messages": "prompt, for routing and length estimates",
    "prompt": "prompt, for routing and length estimates",
    "input": "prompt, or inputs to embed",
    "system": "part of the prompt",
    "instructions": "part of the prompt",
    "tools": "part of the prompt",
    "stream": "whether the response is streamed",
    "stream_options": "include_usage is added to streams without it",
    "n": "number of sequences",
    "best_of": "number of sequences",
    "previous_input_messages": "responses: part of the prompt",
    "max_tokens": "limit of output tokens",
    "max_completion_tokens": "limit of output tokens",
    "max_output_tokens": "limit of output tokens",
    "cache_salt": "part of the routing key; replaced for keys with isolate_cache",
    "prompt_cache_key": "session affinity to a backend",
    "previous_response_id": "selects the backend that stores the response, if the client owns it",
    "store": "stored responses are not retried",
    "background": "stored responses are not retried",
    "vllm_xargs": "refused if it contains a refused field; otherwise passed on",
    "documents": "rerank and score: documents to score, in pieces; chat: part of the prompt",
    "query": "input to score",
    "queries": "input to score",
    "items": "input to score",
    "text_1": "input to score",
    "text_2": "input to score",
    "data_1": "input to score",
    "data_2": "input to score",
    "top_n": "rerank in pieces: applied to the merged result",
}

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


def refuse_fields(document: dict[str, Any]) -> None:
    """Raises InvalidRequest for a field that is refused, at the top level or in `vllm_xargs`."""
    if not _REFUSED.isdisjoint(document):
        _refuse(document)
    xargs = document.get("vllm_xargs")
    if type(xargs) is dict and not _REFUSED.isdisjoint(xargs):
        _refuse(xargs)


def _refuse(fields: dict[str, Any]) -> None:
    name = min(_REFUSED.intersection(fields))
    raise InvalidRequest(f"Unsupported field {name!r}: {REFUSED[name]}.", param=name)


_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_SQUARE = bytes.maketrans(b"{}", b"[]")
_SPELLINGS = frozenset(name.encode() for name in ACTED_ON)
_PIECES_A_STEP = 32768
_LONGEST_BYTES = 6 * max(map(len, ACTED_ON))  # of a key that is spelled with escapes only


def parse_body(body: bytes, limits: ServerConfig) -> Steps[dict[str, Any]]:
    """The body as a JSON object. Raises InvalidRequest with the reason."""
    most, long = limits.max_json_strings, len(body) > SHORT_BYTES
    strings = body
    if len(body) > 2 * most and body.count(b'"') > 2 * most:
        strings = yield from without_escapes(body)
        if strings.count(b'"') > 2 * most:
            raise InvalidRequest(f"The body exceeds the limit of {most} strings (server.max_json_strings).")
    pieces = strings.split(b'"')
    least = min(limits.max_json_depth, limits.max_json_containers)
    has_shape = len(body) > limits.max_json_values or body.count(b"{") + body.count(b"[") > least
    if long:
        yield
    may_repeat = yield from _may_have_a_key_twice(pieces)
    if long:
        yield
    layout = (yield from layout_of(strings)) if has_shape or may_repeat else None
    if has_shape and layout is not None:
        if long:
            yield
        marks = layout.marks()
        if long:
            yield
        _check_shape(marks, limits)
    if long:
        yield
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    if type(document) is not dict:
        raise InvalidRequest("The body must be a JSON object.")
    if long:
        yield
    if may_repeat and layout is not None and (duplicate := _duplicate_key(layout)):
        raise InvalidRequest(f"Duplicate key {duplicate!r}.", param=duplicate)
    refuse_fields(document)
    return document


def _check_shape(marks: bytes, limits: ServerConfig) -> None:
    """Bounds on objects, arrays, values and nesting."""
    containers = marks.count(b"{") + marks.count(b"[")
    if containers > limits.max_json_containers:
        raise InvalidRequest(
            f"The body exceeds the limit of {limits.max_json_containers} objects and arrays"
            " (server.max_json_containers)."
        )
    if len(marks) > limits.max_json_values and marks.count(b",") > limits.max_json_values:
        raise InvalidRequest(f"The body exceeds the limit of {limits.max_json_values} values (server.max_json_values).")
    if containers > limits.max_json_depth:
        if marks.count(b"}") + marks.count(b"]") != containers:
            raise InvalidRequest("The body is not valid JSON: unbalanced brackets.")
        if _is_deeper(marks, limits.max_json_depth):
            raise InvalidRequest(
                f"The body exceeds the limit of {limits.max_json_depth} nesting levels (server.max_json_depth)."
            )


def _is_deeper(marks: bytes, levels: int) -> bool:
    """Whether brackets are left after removing the innermost pairs that many times.

    Brackets and braces count as one kind: the parser finds those that do not match. There are as many closing as
    opening ones.
    """
    brackets = marks.translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(levels):
        brackets = brackets.replace(b"[]", b"")
    return b"[]" in brackets


def _may_have_a_key_twice(pieces: list[bytes]) -> Steps[bool]:
    """Whether a name of ACTED_ON stands in quotation marks twice, or a short string has escapes that can spell one.

    These need not be keys of the top level: they can be values, or keys of nested objects.
    """
    named: list[bytes] = []
    for start in range(0, len(pieces), _PIECES_A_STEP):
        if start:
            yield
        some = pieces[start : start + _PIECES_A_STEP] if len(pieces) > _PIECES_A_STEP else pieces
        short = [piece for piece in some if len(piece) <= _LONGEST_BYTES]
        named += [piece for piece in short if piece in _SPELLINGS or (BACKSLASH in piece and b"\\u" in piece)]
    return len(named) != len(set(named)) or BACKSLASH in b"".join(named)


def _duplicate_key(layout: Layout) -> str | None:
    """A field that the gateway acts on and that occurs twice at the top level, in any spelling."""
    seen = set()
    for place in layout.top_level_keys():
        key = layout.pieces[place]
        if len(key) <= _LONGEST_BYTES and (name := spelled_out(key)) in _SPELLINGS:
            if name in seen:
                return name.decode()
            seen.add(name)
    return None
