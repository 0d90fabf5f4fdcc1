import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core.backends import vllm_api
from gateway.core.backends.facts import KvEventSource

RECORDINGS = Path(__file__).parents[2] / "contract/recordings"


def recorded(name: str) -> Any:
    return json.loads((RECORDINGS / f"{name}.json").read_text())["answer"]["json"]


def test_models_of_vllm_are_read_with_all_that_they_say() -> None:
    [card] = vllm_api.read_models(recorded("models"))
    assert (card.id, card.parent) == ("tiny", None)
    assert card.max_model_len == card.raw["max_model_len"] == 8192
    assert card.raw["object"] == "model"


def test_the_version_of_vllm_is_read() -> None:
    assert vllm_api.read_version(recorded("version")).startswith("0.")


def test_kv_event_sources_of_vllm_are_read() -> None:
    [source] = vllm_api.read_kv_event_sources(recorded("kv_event_sources"))
    assert (source.rank, source.publisher) == (0, "zmq")
    assert (source.endpoint or "").startswith("tcp://*:")
    assert vllm_api.read_kv_event_sources(recorded("embedding_kv_event_sources")) == ()


def test_kv_events_that_are_off_are_no_source() -> None:
    off = {"0": {"enable_kv_cache_events": False, "publisher": "null"}}
    assert vllm_api.read_kv_event_sources(off) == ()


def test_sources_come_in_order_of_rank() -> None:
    on = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    assert vllm_api.read_kv_event_sources({"1": on, "0": on}) == (
        KvEventSource(0, "zmq", "tcp://*:5557", replay_endpoint=None, topic=""),
        KvEventSource(1, "zmq", "tcp://*:5557", replay_endpoint=None, topic=""),
    )


def test_max_num_seqs_is_read() -> None:
    assert vllm_api.read_max_num_seqs({"vllm_config": {"scheduler_config": {"max_num_seqs": 64}}}) == 64


@pytest.mark.parametrize(
    ("read", "document"),
    [
        (vllm_api.read_models, []),
        (vllm_api.read_models, {"data": {}}),
        (vllm_api.read_models, {"data": [{"id": 7}]}),
        (vllm_api.read_models, {"data": [{"id": ""}]}),
        (vllm_api.read_models, {"data": ["m"]}),
        (vllm_api.read_models, {"data": [{"id": "m"}] * 10001}),
        (vllm_api.read_version, {"version": 1}),
        (vllm_api.read_version, "0.32"),
        (vllm_api.read_kv_event_sources, {"0": []}),
        (vllm_api.read_kv_event_sources, {"x": {}}),
        (vllm_api.read_max_num_seqs, {"vllm_config": "text"}),
        (vllm_api.read_max_num_seqs, {"vllm_config": {"scheduler_config": {"max_num_seqs": True}}}),
        (vllm_api.read_max_num_seqs, {"vllm_config": {"scheduler_config": {"max_num_seqs": 0}}}),
    ],
)
def test_other_shapes_are_refused(read: Any, document: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read(document)
