"""A JSON body taken apart at its quotation marks: all the structure that checks and changes of a body need.

Every step costs a small constant for each byte, whatever the body holds. Searches over a whole body are for single
bytes: a search for several can take 20 times as long over a text that is made for it, and holds the interpreter.
"""

from typing import NamedTuple

import orjson

from gateway.front.steps import Steps

_MANY_MARKS = 131072  # a body with more is not split at all of them: an object for each piece takes 40 bytes
_RUN = b"\\" * 4096  # of even length
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'{}[],:"'))
BACKSLASH, _QUOTE, _COLON, _OPENERS = ord("\\"), ord('"'), ord(":"), frozenset(b"{[")


class Layout(NamedTuple):
    """Where a body's strings are.

    `pieces` is alternately what is outside strings and what is inside; an escaped quotation mark is shown as `\\n`,
    which is as long, and so may an escaped backslash be.
    """

    pieces: list[bytes]

    def marks(self) -> bytes:
        """What is outside, reduced to brackets, commas, colons and one quotation mark a string."""
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
    """The body taken apart. What is not JSON comes out as something, in the same time."""
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

    A search for two bytes takes up to 7 ms a MiB, whatever the body holds.
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
