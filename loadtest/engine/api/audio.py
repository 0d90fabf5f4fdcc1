"""POST /v1/audio/transcriptions and /v1/audio/translations: the audio is read as it comes, and the text is made up."""

from collections.abc import Sequence
from typing import Final

import orjson
from aiohttp import BodyPartReader, web

from loadtest.engine.api.chat import final_chunk_usage, stream_events
from loadtest.engine.api.errors import ApiError, invalid
from loadtest.engine.api.exchange import json_answer
from loadtest.engine.choice import Choice
from loadtest.engine.generation import Generation
from loadtest.engine.ledger import LedgerEntry
from loadtest.engine.request_parameters import SamplingParams
from loadtest.engine.service import Service
from loadtest.engine.tokens import tokenise

_MAX_FIELD_BYTES: Final = 64 * 1024
_MAX_AUDIO_BYTES: Final = 25 * 1024 * 1024
# Whisper hears 30 s in 1,500 frames; a compressed second is some 16 kB.
_BYTES_PER_SECOND: Final = 16_000
_TEXT: Final = "the cat sat on the mat"


async def transcribe(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    """Answer a fixed text, or a stream of made-up words."""
    fields, audio_bytes = await _read_form(request)
    if audio_bytes is None:
        raise invalid("body.file", "missing", "Field required", None)
    model = service.check_model(fields.get("model"))
    service.check_admission(1)
    text = f"<|startoftranscript|>{fields.get('prompt') or ''}"
    prompt = service.prompt(tokenise(text), text, model, "")
    entry.note(service.request_id(request), model, [prompt.nonce])
    wanted = len(_TEXT) // 4 + 1
    choices = service.choices([prompt], SamplingParams(max_tokens=wanted, ignore_eos=True), entry)
    task = request.path.rpartition("/")[2].removesuffix("s")
    if _is_set(fields, "stream"):
        head = event_head(service.request_id(request), task, service.created(), model)
        events = SpeechEvents(head, choices[0], include_usage=_is_set(fields, "stream_include_usage"))
        return await stream_events(service, request, entry, choices=choices, events=events)
    with Generation(service.engine, choices, entry) as generation:
        await generation.finished()
    if fields.get("response_format") == "text":
        return json_answer(_TEXT)
    if task == "translation":
        return json_answer({"text": _TEXT})
    seconds = max(1, audio_bytes // _BYTES_PER_SECOND)
    return json_answer({"text": _TEXT, "usage": {"type": "duration", "seconds": seconds}})


def _is_set(fields: dict[str, str], name: str) -> bool:
    return fields.get(name, "").lower() in ("true", "1")


def event_head(request_id: str, task: str, created: int, model: str) -> bytes:
    """What every event begins with, up to its choices."""
    fields = {"id": f"trsc-{request_id}", "object": f"{task}.chunk", "created": created, "model": model}
    return b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['


class SpeechEvents:
    """The chunks of a streamed text: without a role, an index or a fingerprint."""

    def __init__(self, head: bytes, choice: Choice, *, include_usage: bool) -> None:
        self._head = head
        self._choice = choice
        self._include_usage = include_usage

    def heading(self) -> Sequence[bytes]:
        return ()

    def opening(self) -> Sequence[bytes]:
        return ()

    def tokens(self, choice: Choice, start: int, stop: int, last: bool) -> Sequence[bytes]:
        """One chunk with the text of the new tokens."""
        ended = b""
        if last:
            ended = b',"finish_reason":%b,"stop_reason":null' % orjson.dumps(choice.finish_reason)
        text = orjson.dumps(choice.text(start, stop))
        return (self._head + b'{"delta":{"content":' + text + b"}" + ended + b"}]}\n\n",)

    def closing(self) -> Sequence[bytes]:
        """The chunk with the usage, if it was asked for."""
        if not self._include_usage:
            return ()
        sequence = self._choice.sequence
        counts = final_chunk_usage(sequence.prompt_tokens, sequence.output_tokens, None)
        return (self._head + b'],"usage":%b}\n\n' % orjson.dumps(counts),)

    def done(self) -> Sequence[bytes]:
        return (b"data: [DONE]\n\n",)


async def _read_form(request: web.BaseRequest) -> tuple[dict[str, str], int | None]:
    """The text fields, and the size of the file, which is not kept."""
    if not request.content_type.startswith("multipart/"):
        raise invalid("body.file", "missing", "Field required", None)
    fields: dict[str, str] = {}
    audio_bytes: int | None = None
    async for part in await request.multipart():
        if not isinstance(part, BodyPartReader):
            continue
        size, kept = 0, bytearray()
        while chunk := await part.read_chunk(65536):
            size += len(chunk)
            if size > _MAX_AUDIO_BYTES:
                raise ApiError(413, "Maximum file size exceeded", "Request Entity Too Large")
            if part.name != "file":
                kept += chunk[: _MAX_FIELD_BYTES - len(kept)]
        if part.name == "file":
            audio_bytes = size
        elif part.name:
            fields[part.name] = kept.decode("utf-8", "replace")
    return fields, audio_bytes
