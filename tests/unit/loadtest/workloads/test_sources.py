"""Conversations, lists of texts, and lengths as people's."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import pytest

from loadtest.workloads.bodies import DatasetError
from loadtest.workloads.prompts import BodyMaker, Endpoint, Prompt, WorkloadSpec
from loadtest.workloads.sources import source_of


def _spec(kind: str, **more: Any) -> WorkloadSpec:
    return WorkloadSpec.model_validate({"kind": kind, "bytes_per_token": 4, **more})


def _dataset(folder: Path, conversations: list[list[str]]) -> dict[str, str]:
    path = folder / "shared.json"
    speakers = ("human", "gpt")
    path.write_text(
        json.dumps(
            [
                {"conversations": [{"from": speakers[i % 2], "value": text} for i, text in enumerate(texts)]}
                for texts in conversations
            ]
        )
    )
    return {"path": str(path), "sha256": ""}


def test_sessions_have_turns_within_bounds_pauses_and_a_prefix_of_their_group() -> None:
    source = source_of(_spec("sessions", turns=(2, 4), think_seconds=3.0, groups=2, prefix_tokens=50))
    sessions = [source.turns(index) for index in range(300)]
    assert {len(turns) for turns in sessions} == {2, 3, 4}
    assert {len({turn.prompt.prefix for turn in turns}) for turns in sessions} == {1}
    assert len({turns[0].prompt.prefix for turns in sessions}) == 2
    pauses = [turn.pause_seconds for turns in sessions for turn in turns[1:]]
    assert all(turns[0].pause_seconds == 0 for turns in sessions)
    assert sum(pauses) / len(pauses) == pytest.approx(3.0, rel=0.15)
    assert all(turn.remembers for turns in sessions for turn in turns)


def test_a_turn_is_planned_as_long_as_all_that_was_said() -> None:
    spec = _spec("sessions", turns=(3, 3), prefix_tokens=100, tail_tokens=10, max_tokens=7)
    turns = source_of(spec).turns(0)
    assert [turn.prompt.asked_tokens for turn in turns] == [110, 127, 144]


def test_history_stands_between_prefix_and_question_with_alternating_roles() -> None:
    prompt = Prompt(0, prefix="system", tail="third", max_tokens=9).after(
        ("first", "answer one", "second", "answer two")
    )
    body = orjson.loads(BodyMaker(Endpoint.CHAT, "m", stream=True).body(prompt))
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("system", "system"),
        ("user", "first"),
        ("assistant", "answer one"),
        ("user", "second"),
        ("assistant", "answer two"),
        ("user", "third"),
    ]
    body = orjson.loads(BodyMaker(Endpoint.COMPLETIONS, "m", stream=True).body(prompt))
    assert body["prompt"] == "systemfirstanswer onesecondanswer twothird"


def test_lists_of_texts_are_within_bounds_and_small_ones_are_common() -> None:
    source = source_of(_spec("texts", inputs=(1, 64), tail_tokens=20))
    prompts = [source.turns(index)[0].prompt for index in range(600)]
    sizes = [len(prompt.inputs) for prompt in prompts]
    assert (min(sizes), max(sizes)) == (1, 64)
    assert 5 <= median(sizes) <= 10
    assert all(prompt.asked_tokens == 20 * len(prompt.inputs) for prompt in prompts)
    body = orjson.loads(BodyMaker(Endpoint.EMBEDDINGS, "m", stream=False).body(prompts[0]))
    assert body["input"] == (list(prompts[0].inputs) if sizes[0] > 1 else prompts[0].inputs[0])


def test_lengths_like_sharegpts_have_its_medians_and_bounds() -> None:
    source = source_of(_spec("sharegpt"))
    prompts = [source.turns(index)[0].prompt for index in range(3000)]
    asked = [prompt.asked_tokens for prompt in prompts]
    answers = [prompt.max_tokens for prompt in prompts]
    assert 35 <= median(asked) <= 47
    assert 175 <= median(answers) <= 230
    assert max(asked) <= 1024
    assert min(*asked, *answers) >= 4


def test_a_dataset_gives_its_questions_and_lengths_in_the_seeds_order(tmp_path: Path) -> None:
    file = _dataset(tmp_path, [["one?", "x" * 40], ["two?", "y" * 80, "more?", "z" * 12], ["three?", "w" * 4]])
    source = source_of(_spec("sharegpt", file=file, seed=3))
    prompts = [source.turns(index)[0].prompt for index in range(3)]
    lengths = {"one?": 10, "two?": 20, "three?": 1}
    assert {prompt.tail: prompt.max_tokens for prompt in prompts} == lengths
    assert {source.turns(index)[0].prompt.tail[:3] for index in range(3, 6)} == {"2. "}


def test_a_datasets_conversations_are_sent_whole_as_sessions(tmp_path: Path) -> None:
    file = _dataset(tmp_path, [["two?", "y" * 80, "more?", "z" * 12]])
    turns = source_of(_spec("sessions", file=file)).turns(0)
    assert [(turn.prompt.tail, turn.prompt.max_tokens, turn.remembers) for turn in turns] == [
        ("two?", 20, True),
        ("more?", 3, True),
    ]


@pytest.mark.parametrize("text", ["{", "{}", "[]", '[{"conversations": [{"from": "gpt", "value": "x"}]}]', "[3]"])
def test_a_file_of_another_form_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(DatasetError, match=r"odd\.json"):
        source_of(_spec("sharegpt", file={"path": str(path), "sha256": ""}))
