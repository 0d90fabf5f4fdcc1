"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from typing import Final

from aiohttp import BodyPartReader, web

from loadtest.engine.api.chat import note
from loadtest.engine.api.errors import ApiError, invalid
from loadtest.engine.api.exchange import json_answer
from loadtest.engine.generation import Generation
from loadtest.engine.ledger import Entry
from loadtest.engine.sampling import Sampling
from loadtest.engine.service import Service
from loadtest.engine.tokens import tokenise

_MAX_FIELD_BYTES: Final = 64 * 1024
_MAX_AUDIO_BYTES: Final = 25 * 1024 * 1024
# Whisper hears 30 s in 1,500 frames; a compressed second is some 16 kB.
_BYTES_PER_SECOND: Final = 16_000
_TEXT: Final = "the cat sat on the mat"


async def transcribe(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:
    """Read the audio as it comes, and answer a fixed text."""
    fields, audio_bytes = await _read_form(request)
    if audio_bytes is None:
        raise invalid("body.file", "missing", "Field required", None)
    model = service.check_model(fields.get("model"))
    service.check_admission(1)
    text = f"<|startoftranscript|>{fields.get('prompt') or ''}"
    prompt = service.prompt(tokenise(text), text, model, "")
    note(entry, model, [prompt])
    entry.request_id = service.request_id(request)
    wanted = len(_TEXT) // 4 + 1
    choices = service.choices([prompt], Sampling(max_tokens=wanted, ignore_eos=True), entry)
    with Generation(service.engine, choices, entry) as generation:
        await generation.finished()
    if fields.get("response_format") == "text":
        return json_answer(_TEXT)
    seconds = max(1, audio_bytes // _BYTES_PER_SECOND)
    return json_answer({"text": _TEXT, "usage": {"type": "duration", "seconds": seconds}})


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
