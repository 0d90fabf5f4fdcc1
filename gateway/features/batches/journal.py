"""The part of one gateway in a batch's answers, which is its journal: lines are appended, and made durable in groups.

After a crash, the parts say which lines have an answer; a line that was not written completely is passed over. When the
disk is full, what could not be written is kept, and nothing more is accepted, until there is room.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import orjson

from gateway.core.resources import Holding
from gateway.features.batches.batch import Batch, Tally
from gateway.features.batches.contents import AnswerFile, JournalGroup, has_no_room
from gateway.features.batches.errors import StorageUnavailable

NO_SPACE = "no space is left on the disk"
_RETRY_SECONDS = 1.0
_WHOLE_BYTES = 1048576  # longer lines are not parsed as a whole
_MOST_LINE_BYTES = 67174400  # the longest answer, and what its line has besides
_BEGIN = re.compile(rb'\{"id":"batch_req_([0-9]{1,9})_')  # with the place of the line in the input file
_END = b'},"error":null}\n'
_USAGE = b'"usage":'
Breathe = Callable[[], None]


class LineName(NamedTuple):
    """What identifies a line in its file: its place in the input file, by which it is found again; an id, by which it
    differs from others of the same place; and what the client calls it.
    """

    place: int
    line_id: str
    custom_id: str

    def fields(self) -> bytes:
        return b'{"id":"batch_req_%d_%b","custom_id":%b' % (
            self.place, self.line_id.encode(), orjson.dumps(self.custom_id),
        )  # fmt: skip


def answer_line(name: LineName, status: int, request_id: str, body: bytes) -> bytes:
    """The line of an answer, or of an error that has an HTTP status. `body` is JSON on one line."""
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, orjson.dumps(request_id), body)
    return b'%b,"response":%b,"error":null}\n' % (name.fields(), response)


def why_unexecuted(batch: Batch) -> tuple[str, str, str]:
    """State, code and message of lines that were never executed, of a batch that is being finalized."""
    if batch.ends_as == "cancelled":
        return "cancelled", "batch_cancelled", "This request was not executed before the batch was cancelled."
    message = "This request could not be executed before the completion window expired."
    return "expired", "batch_expired", message


def unexecuted_line(name: LineName, code: str, message: str) -> bytes:
    """The line of a request that was never executed."""
    return b'%b,"response":null,"error":%b}\n' % (name.fields(), orjson.dumps({"code": code, "message": message}))


def on_one_line(body: bytes) -> bytes | None:
    """A JSON answer without line breaks; None = it is not JSON. Very long ones are not parsed."""
    if len(body) <= _WHOLE_BYTES:
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError:
            return None
    elif not (body.startswith((b"{", b"[")) and body.rstrip().endswith((b"}", b"]"))):
        return None
    return body.replace(b"\n", b" ").replace(b"\r", b" ")  # none is in a string: there they are escaped


def tally_of(body: bytes) -> Tally:
    """One completed line, with the tokens that its answer reports, by the names of chat or of responses."""
    usage = _usage_in(body)
    inputs = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    outputs = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    return Tally(
        completed=1,
        input_tokens=_tokens(usage, "prompt_tokens") or _tokens(usage, "input_tokens"),
        cached_tokens=_tokens(inputs, "cached_tokens"),
        output_tokens=_tokens(usage, "completion_tokens") or _tokens(usage, "output_tokens"),
        reasoning_tokens=_tokens(outputs, "reasoning_tokens"),
    )


def _usage_in(body: bytes) -> dict[str, Any]:
    at = body.rfind(_USAGE)
    if at < 0:
        return {}
    end = body[at : at + 4096]
    try:
        usage = orjson.loads(b"{" + end)["usage"]  # mostly, it is one of the last fields of the whole
    except orjson.JSONDecodeError:
        try:
            usage, _ = json.JSONDecoder().raw_decode(end[len(_USAGE) :].decode("utf-8", "replace").lstrip())
        except ValueError:
            return {}
    return usage if type(usage) is dict else {}


def _tokens(fields: Any, name: str) -> int:
    value = fields.get(name) if type(fields) is dict else None
    return value if type(value) is int and 0 <= value < 1 << 40 else 0


def whole_lines(source: BinaryIO, breathe: Breathe) -> Iterator[tuple[int, bytes]]:
    """The place in the input file, and the text, of each line of a part that is whole."""
    while line := source.readline(_MOST_LINE_BYTES):
        breathe()
        if (begin := _BEGIN.match(line)) is not None and _is_whole(line):
            yield int(begin[1]), line


def _is_whole(line: bytes) -> bool:
    if not line.endswith(_END):
        return False
    if len(line) <= _WHOLE_BYTES:
        try:
            orjson.loads(line)
        except orjson.JSONDecodeError:
            return False
    return True


class Journal:
    """Appends to the two files of a batch. `on_pause` gets the reason why nothing can be written; "" = it can again."""

    def __init__(
        self, answers: AnswerFile, errors: AnswerFile, on_pause: Callable[[str], None], *, group: JournalGroup
    ) -> None:
        self._files = (answers, errors)
        self._on_pause = on_pause
        self._group = group
        self._held: tuple[list[bytes], list[bytes]] = ([], [])
        self._holdings: list[Holding] = []  # the memory of what is held
        self._accepted = self._durable = 0  # lines in all
        self._held_bytes = 0  # of those that are not durable yet
        self._full = asyncio.Event()  # a group is complete, or is waited for
        self._room = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None  # while lines are held

    @property
    def _is_full(self) -> bool:
        return self._accepted - self._durable >= self._group.lines or self._held_bytes >= self._group.size_bytes

    async def append(self, line: bytes, *, failed: bool, holding: Holding | None = None) -> None:
        """Accept a line; returns when it is in the group that is made durable next.

        `holding` has its memory, which is given back when the line has been written. Short lines need none.
        """
        while self._is_full:
            self._room.clear()
            await self._room.wait()
        self._accepted += 1
        self._held_bytes += len(line)
        self._held[failed].append(line)
        if holding is not None:
            self._holdings.append(holding.passed_on())
        if self._is_full:
            self._full.set()
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write(), name="batch_journal")

    async def _write(self) -> None:
        while self._durable < self._accepted:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._group.seconds):
                    await self._full.wait()
            await self._write_group()
        self._writer = None

    async def _write_group(self) -> None:
        taken, self._held = self._held, ([], [])
        holdings, self._holdings = self._holdings, []
        count = sum(map(len, taken))
        try:
            for file, lines in zip(self._files, taken, strict=True):
                if lines:
                    data = b"".join(lines)
                    lines.clear()
                    await self._append(file, data)
                    self._held_bytes -= len(data)
                    del data
        finally:
            for each in holdings:
                each.release()
        self._durable += count
        if not self._is_full:
            self._full.clear()
        self._room.set()

    async def _append(self, file: AnswerFile, data: bytes) -> None:
        while True:
            try:
                await file.append(data)
            except StorageUnavailable as error:
                reason = error.message
            except OSError as error:
                reason = NO_SPACE if has_no_room(error) else f"cannot write: {error.strerror}"
            else:
                self._on_pause("")
                return
            self._on_pause(reason)
            await asyncio.sleep(_RETRY_SECONDS)

    async def flush(self) -> None:
        """Wait until all that was accepted before is durable."""
        accepted = self._accepted
        while self._durable < accepted:
            self._full.set()
            self._room.clear()
            await self._room.wait()

    async def close(self, *, most_seconds: float | None = None) -> None:
        """Write what was accepted, and close the files. Gives up after this time if nothing can be written."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_seconds):
                await self.flush()
        if (writer := self._writer) is not None:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        self._held = ([], [])
        for each in self._holdings:
            each.release()
        self._holdings.clear()
        for file in self._files:
            await file.finish()
