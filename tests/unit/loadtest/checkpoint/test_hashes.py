"""Hashes of models, plans and prompts."""

from pathlib import Path

import pytest

from loadtest.checkpoint.hashes import NoSource, artefacts, model_files, plan_sha256, sent_sha256, unlike_the_plan
from tests.unit.loadtest.checkpoint.made import plan, record

PLAN = plan()
RECORDS = [record(PLAN, index, index / 10) for index in range(5)]


def test_a_models_folder_tells_its_configuration_and_the_sizes_of_its_weights(tmp_path: Path) -> None:
    assert model_files(tmp_path) is None
    for name, text in (("config.json", "{}"), ("tokenizer.json", "[]"), ("model.safetensors", "12345")):
        (tmp_path / name).write_text(text)
    found = model_files(tmp_path)
    assert found is not None
    assert found.sha256.keys() == {"config.json", "tokenizer.json"}
    assert found.weights_bytes == {"model.safetensors": 5}
    (tmp_path / "tokenizer.json").write_text("[1]")
    assert model_files(tmp_path) != found


def test_files_are_known_by_name_and_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    assert artefacts([tmp_path / "a"]) == {"a": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}


def test_the_plan_is_the_same_wherever_it_is_sent() -> None:
    assert plan_sha256(PLAN) == plan_sha256(plan(url="http://elsewhere", cache_salt="x", api_key="k"))
    assert plan_sha256(PLAN) != plan_sha256(plan(concurrency=3))


def test_what_was_sent_is_the_same_in_any_order_and_another_with_another_body() -> None:
    assert sent_sha256(RECORDS) == sent_sha256(RECORDS[::-1])
    assert sent_sha256(RECORDS) != sent_sha256(RECORDS[1:])
    assert sent_sha256([*RECORDS, record(PLAN, 9, 1.0, body_hash="")]) == sent_sha256(RECORDS)


def test_bodies_that_the_workload_does_not_make_are_found() -> None:
    assert unlike_the_plan(PLAN, RECORDS, 100) == (5, [])
    other = record(PLAN, 7, 1.0, body_hash="0" * 32)
    assert unlike_the_plan(PLAN, [*RECORDS, other], 100) == (6, [7])
    seeded = PLAN.model_copy(update={"workload": PLAN.workload.model_copy(update={"seed": 8})})
    assert unlike_the_plan(seeded, RECORDS, 3) == (3, [0, 1, 2])


def test_each_part_of_a_mix_makes_its_own() -> None:
    part = {"name": "chat", "share": 1.0, "endpoint": "chat", "stream": True, "model": "m"}
    mixed = plan(mix=[part | {"workload": PLAN.workload.model_dump()}])
    one = record(mixed, 0, 0.0, part="chat")
    assert unlike_the_plan(mixed, [one], 10) == (1, [])
    assert unlike_the_plan(mixed, [record(mixed, 0, 0.0, part="gone")], 10) == (1, [0])


def test_a_workload_whose_file_is_gone_or_another_cannot_be_made_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traced = plan(workload={"kind": "trace", "file": {"path": str(path), "sha256": "0" * 64}})
    with pytest.raises(NoSource, match="No such file"):
        unlike_the_plan(traced, RECORDS, 10)
    path.write_text("{}")
    with pytest.raises(NoSource, match="has changed"):
        unlike_the_plan(traced, RECORDS, 10)
