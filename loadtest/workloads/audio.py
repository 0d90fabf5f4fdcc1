"""Audio to upload: WAV files that are made up, or files of a folder or of a list. Only WAV has a length known here."""

from __future__ import annotations

import io
import random
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from loadtest.workloads.bodies import DatasetError
from loadtest.workloads.prompts import NO_GROUP, Audio, Prompt, Source, Turn, WorkloadSpec, log_uniform

_SAMPLES_PER_SECOND = 16_000  # what Whisper hears
_LOUDEST = 2_000  # of 32,767: quiet noise
_SUFFIXES = (".flac", ".m4a", ".mp3", ".mp4", ".mpeg", ".mpga", ".ogg", ".wav", ".webm")
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class AudioFile:
    """One file, its length where that is known, and the fields of the form that go with it."""

    path: Path
    seconds: float | None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def read(self) -> Audio:
        return Audio(self.path.name, self.path.read_bytes(), self.seconds, fields=self.fields)


def made_up(rng: random.Random, seconds: int) -> Audio:
    """A second of noise that no other has, repeated: servers that cache what they heard find nothing."""
    second = np.random.default_rng(rng.getrandbits(64)).integers(-_LOUDEST, _LOUDEST, _SAMPLES_PER_SECOND, np.int16)
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_SAMPLES_PER_SECOND)
        file.writeframes(second.astype("<i2").tobytes() * seconds)
    return Audio("noise.wav", written.getvalue(), float(seconds))


def audio_files(path: Path) -> list[AudioFile]:
    """Those of a folder by name, or of JSON lines with `audio`, a path. Raises DatasetError."""
    try:
        found = _of_folder(path) if path.is_dir() else list(_of_lines(path))
    except OSError as error:
        raise DatasetError(f"{error.filename or path}: {error.strerror or error}") from None
    if not found:
        raise DatasetError(f"{path}: has no audio ({', '.join(_SUFFIXES)})")
    return found


def _of_folder(folder: Path) -> list[AudioFile]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    return [AudioFile(path, _seconds(path)) for path in paths]


def _of_lines(path: Path) -> Iterator[AudioFile]:
    """Paths are relative to the list. `seconds` is the length; all other keys are fields of the form."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DatasetError(f"{path}:{number}: {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get("audio"), str):
            raise DatasetError(f'{path}:{number}: not an object with `audio`, such as {{"audio": "one.wav"}}')
        file, known = path.parent / document.pop("audio"), document.pop("seconds", None)
        if known is not None and (isinstance(known, bool) or not isinstance(known, int | float) or not known > 0):
            raise DatasetError(f"{path}:{number}: seconds is not a number above 0")
        yield AudioFile(file, _seconds(file) if known is None else float(known), document)


def _seconds(path: Path) -> float | None:
    """The length of a WAV file; raises OSError where there is no such file."""
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise DatasetError(f"{path}: more than {_MOST_BYTES >> 20} MiB")
    try:
        with wave.open(str(path), "rb") as file:
            return file.getnframes() / file.getframerate()
    except (wave.Error, EOFError):
        return None


class AudioSource(Source):
    """One upload a request: made up, its length even in the logarithm; or each file in turn, over and over."""

    def __init__(self, spec: WorkloadSpec) -> None:
        super().__init__(spec)
        self._files = audio_files(Path(spec.file.path)) if spec.file is not None else []

    def turns(self, index: int) -> Sequence[Turn]:
        if self._files:
            return (Turn(_prompt(self._files[index % len(self._files)].read())),)
        return (Turn(_prompt(self._made_up(f"request {index}"))),)

    def warmup(self, index: int) -> Prompt:
        return _prompt(self._made_up(f"warm-up {index}"))

    def _made_up(self, label: str) -> Audio:
        rng = random.Random(f"{self.spec.seed}-{label}")
        low, high = self.spec.audio_seconds or (10, 10)
        return made_up(rng, log_uniform(rng, low, high))


def _prompt(audio: Audio) -> Prompt:
    return Prompt(NO_GROUP, prefix="", tail="", max_tokens=0, audio=audio)
