"""Hashes of models, plans and prompts."""

from pathlib import Path

from loadtest.access import Access
from loadtest.checkpoint.fingerprints import artefacts, model_files, plan_sha256, sent_sha256
from tests.unit.loadtest.checkpoint.made import plan, record

PLAN = plan()
RECORDS = [record(PLAN, index, index / 10) for index in range(5)]


def test_a_models_folder_reports_its_configuration_and_the_sizes_of_its_weights(tmp_path: Path) -> None:
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
    assert plan_sha256(PLAN) == plan_sha256(plan(url="http://elsewhere", cache_salt="x", access=Access.of("k")))
    assert plan_sha256(PLAN) != plan_sha256(plan(concurrency=3))


def test_what_was_sent_is_the_same_in_any_order_and_another_with_another_body() -> None:
    assert sent_sha256(RECORDS) == sent_sha256(RECORDS[::-1])
    assert sent_sha256(RECORDS) != sent_sha256(RECORDS[1:])
    assert sent_sha256([*RECORDS, record(PLAN, 9, 1.0, body_hash="")]) == sent_sha256(RECORDS)
