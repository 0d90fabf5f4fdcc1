"""The functions of `kernel.c` in Python."""

import json
import re
from collections.abc import Container
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

_HEAD = re.compile(
    rb"(GET|POST) (/[A-Za-z0-9/._?=&%:@+~-]{0,511}) HTTP/1\.1\r\n"
    rb"((?:[A-Za-z0-9-]{1,64}: ?[!-~](?:[ -~]*[!-~])?\r\n){1,32})\r\n"
)
_FIELD = re.compile(rb"([A-Za-z0-9-]+): ?([ -~]+)\r\n")
_MAX_HEAD_BYTES = 4096
_FRAMING = frozenset((b"expect", b"proxy-connection", b"transfer-encoding", b"upgrade"))


def whole_request(
    data: bytes | memoryview, known: Container[bytes]
) -> tuple[bytes, bytes, dict[bytes, bytes], bytes] | None:
    """Method, target, known headers and body of a request that is all of `data`, if nothing about it is unusual.

    None = read it with the HTTP parser. A subset of HTTP/1.1 that leaves no choice of interpretation: a connection that
    stays open, a body with a length, each known header once, `known` in lower case and with the fields of the framing.
    """
    match = _HEAD.match(data, 0, _MAX_HEAD_BYTES)
    if match is None:
        return None
    headers: dict[bytes, bytes] = {}
    method, target, fields = match.groups()
    for name, value in _FIELD.findall(fields):
        name = name.lower()
        if name in _FRAMING or name in headers:
            return None
        if name in known:
            headers[name] = value
        elif name == b"connection" and value.lower() != b"keep-alive":
            return None
    length, size = headers.get(b"content-length", b"0"), len(data) - match.end()
    if b"host" not in headers or len(length) > 10 or not length.isdigit() or int(length) != size:
        return None
    return method, target, headers, bytes(data[match.end() :])


_HEX_DIGITS = b"0123456789abcdefABCDEF"
_MAX_SIZE_DIGITS = 6
_DONE = b"[DONE]"
_ERROR = b'data: {"error"'
_ABORTED = b'"finish_reason":"abort"'
_USAGE = b'"usage"'


def event_chunks(data: bytes) -> int:
    """The number of chunks that `data` is, if they have whole server-sent events and may be passed on as they are.

    0 = they are unusual, or an event may be more than a piece of text: usage, an error, the end.
    """
    chunks = at = 0
    while at < len(data):
        start = data.find(b"\r\n", at, at + _MAX_SIZE_DIGITS + 2)
        digits = data[at:start]
        if start <= at or digits.strip(_HEX_DIGITS) or (size_bytes := int(digits, 16)) < 2:
            return 0
        at = start + size_bytes + 4
        if data[at - 4 : at] != b"\n\n\r\n":
            return 0
        chunks += 1
    # Not `in`, which tries to take bytes for a number first.
    is_special = any(data.find(word) >= 0 for word in (_DONE, _ERROR, _ABORTED, _USAGE))
    return 0 if is_special else chunks


_DEEPEST = 128  # nesting, independent of the requested limit
_BACKSLASH, _COLON, _OPENERS = ord("\\"), ord(":"), frozenset(b"{[")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"{}[]:"))


def json_object(body: bytes, max_depth: int) -> dict[str, Any] | None:
    """The object that a JSON text is. None = it is none, has a key twice at its top level, or is nested deeper."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if _BACKSLASH in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotation marks left begin and end strings
    keys, depth, deepest = 0, 0, min(max_depth, _DEEPEST)
    for mark in b"".join(body.split(b'"')[::2]).translate(None, _NOT_STRUCTURE):
        if mark == _COLON:
            keys += depth == 1
        elif mark in _OPENERS:
            depth += 1
            if depth > deepest:
                return None
        else:
            depth -= 1
    return document if type(document) is dict and keys == len(document) else None


_LEAST_TURN_BYTES = 512  # least size that a turn counts with: at most 4096 of them become blocks


def text_turns(turns: list[Any], room: int) -> tuple[list[bytes], int] | None:
    """The canonical bytes of each turn, and the index of the last answer, or -1, if all are a role and a text.

    None = some turn has more or other fields, or there is no `room` for it.
    """
    pieces: list[bytes] = []
    answer = -1
    if type(turns) is not list:
        return None
    for turn in turns:
        if room <= 0 or type(turn) is not dict or len(turn) != 2:
            return None
        role, content = turn.get("role"), turn.get("content")
        if type(role) is not str or type(content) is not str or len(content) > room:
            return None
        if role == "assistant":
            answer = len(pieces)
        piece = f"\x1e{role}\x1f{content}".encode()
        pieces.append(piece)
        room -= max(len(piece), _LEAST_TURN_BYTES)
    return pieces, answer


_SIZES = ((256, 4096), (512, 8192), (1024, 16384), (2048, 32768), (4096, 2097152))  # of blocks, up to a position
LONGEST_BYTES = _SIZES[-1][1]  # of a prompt; text beyond it has no key


def prefix_keys(pieces: list[bytes], chain: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The keys of a prompt's blocks, its length in bytes up to the end of each, and how many there are up to the end of
    each piece.

    `pieces` are its messages, `chain` is the key before the first one.
    """
    keys: list[int] = []
    edges: list[int] = []
    ends: list[int] = []
    position, sizes = 0, iter(_SIZES)
    step, until = next(sizes)
    for piece in pieces:
        at, length = 0, min(len(piece), LONGEST_BYTES - position)
        while at < length:
            while position + at >= until:
                step, until = next(sizes)
            chain = xxh3_64_intdigest(piece[at : min(at + step, length)], chain)
            keys.append(chain)
            at += step
            edges.append(position + at)
        if length:
            edges[-1] = position + length
        ends.append(len(keys))
        position += length
        if position >= LONGEST_BYTES:
            break
    return tuple(keys), tuple(edges), tuple(ends)


def json_line(template: bytes, values: list[Any]) -> bytes:
    """The template, with values as JSON in the places of its `%b`.

    The extension returns None for unusual values: text with escapes, more than three decimals, a long line.
    """
    try:
        return template % tuple(map(orjson.dumps, values))
    except TypeError:  # a number beyond 64 bits, or text that is no UTF-8
        return template % tuple([json.dumps(value).encode() for value in values])
