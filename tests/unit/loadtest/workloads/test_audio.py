"""Audio to upload, made up or from files, and the form that carries it."""

from __future__ import annotations

import io
import random
import wave
from pathlib import Path

import orjson
import pytest

from loadtest.workloads.audio import audio_files, made_up
from loadtest.workloads.bodies import DatasetError
from loadtest.workloads.prompts import Audio, BodyMaker, Endpoint, Prompt, SourceFile, WorkloadSpec
from loadtest.workloads.sources import source_of


def _length(data: bytes) -> float:
    with wave.open(io.BytesIO(data), "rb") as file:
        return file.getnframes() / file.getframerate()


def _of(spec: WorkloadSpec, index: int) -> Audio:
    (turn,) = source_of(spec).turns(index)
    assert turn.prompt.audio is not None
    return turn.prompt.audio


def test_made_up_audio_is_a_wav_file_of_its_length_that_no_other_request_has() -> None:
    spec = WorkloadSpec(kind="audio", audio_seconds=(2, 30), seed=7)
    made = [_of(spec, index) for index in range(200)]
    assert all(audio.seconds == _length(audio.data) for audio in made)
    lengths = [audio.seconds or 0 for audio in made]
    assert all(2 <= length <= 30 for length in lengths)
    assert sum(length < 8 for length in lengths) == pytest.approx(100, abs=20)  # even in the logarithm
    assert len({audio.data for audio in made}) == 200
    assert made[3] == _of(spec, 3)
    warmup = source_of(spec).warmup(0).audio
    assert warmup is not None
    assert warmup.data not in {audio.data for audio in made}


def test_a_folder_is_sent_file_by_file_and_begins_again(tmp_path: Path) -> None:
    (tmp_path / "b.wav").write_bytes(made_up(random.Random(1), 3).data)
    (tmp_path / "a.mp3").write_bytes(b"ID3")
    (tmp_path / "notes.txt").write_text("not audio")
    spec = WorkloadSpec(kind="audio", file=SourceFile.of(tmp_path))
    sent = [_of(spec, index) for index in range(3)]
    assert [(audio.name, audio.seconds) for audio in sent] == [("a.mp3", None), ("b.wav", 3), ("a.mp3", None)]


def test_a_list_names_files_beside_it_their_lengths_and_fields_of_the_form(tmp_path: Path) -> None:
    (tmp_path / "one.mp3").write_bytes(b"ID3")
    line = {"audio": "one.mp3", "seconds": 4.5, "language": "de"}
    (tmp_path / "list.jsonl").write_bytes(orjson.dumps(line) + b"\n\n")
    (file,) = audio_files(tmp_path / "list.jsonl")
    assert file.read() == Audio("one.mp3", b"ID3", 4.5, fields={"language": "de"})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"file": "one.wav"}', "list.jsonl:1: not an object with `audio`"),
        ('{"audio": "none.wav"}', "none.wav: No such file"),
        ('{"audio": "list.jsonl", "seconds": 0}', "list.jsonl:1: seconds is not a number above 0"),
        ("audio", "list.jsonl:1: "),
        ("", "has no audio"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused_before_the_run(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text(line)
    with pytest.raises(DatasetError, match=complaint):
        audio_files(path)


def test_a_form_has_the_fields_and_the_file_last() -> None:
    made = BodyMaker(Endpoint.TRANSCRIPTIONS, "whisper", stream=True, cache_salt="s", extra={"temperature": 0})
    prompt = Prompt(
        -1, prefix="", tail="", max_tokens=0, audio=Audio('a "b".mp3', b"\x00\xff", None, fields={"language": "de"})
    )
    boundary = Endpoint.TRANSCRIPTIONS.content_type.partition("boundary=")[2].encode()
    _, *parts, end = made.body(prompt).split(b"--" + boundary)
    assert end == b"--\r\n"
    values = dict(part.removesuffix(b"\r\n").split(b"\r\n\r\n") for part in parts)
    name = b"\r\ncontent-disposition: form-data; name="
    assert values == {
        name + b'"model"': b"whisper",
        name + b'"response_format"': b"json",
        name + b'"stream"': b"true",
        name + b'"stream_include_usage"': b"true",
        name + b'"language"': b"de",
        name + b'"temperature"': b"0",
        name + b'"file"; filename="a%20%22b%22.mp3"': b"\x00\xff",
    }
