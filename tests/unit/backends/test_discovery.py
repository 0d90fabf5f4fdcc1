import json
from pathlib import Path
from typing import Any

import pytest

from gateway.backends import discovery
from gateway.backends.backend import KvEventSource

RECORDINGS = Path(__file__).parents[2] / "contract/recordings"


def recorded(name: str) -> Any:
    return json.loads((RECORDINGS / f"{name}.json").read_text())["answer"]["json"]


def test_models_of_vllm_are_read_with_all_that_they_say() -> None:
    [card] = discovery.read_models(recorded("models"))
    assert (card.id, card.parent) == ("tiny", None)
    assert card.max_model_len == card.raw["max_model_len"] == 8192
    assert card.raw["object"] == "model"


def test_the_version_of_vllm_is_read() -> None:
    assert discovery.read_version(recorded("version")).startswith("0.")


def test_kv_event_sources_of_vllm_are_read() -> None:
    [source] = discovery.read_kv_event_sources(recorded("kv_event_sources"))
    assert (source.rank, source.publisher) == (0, "zmq")
    assert (source.endpoint or "").startswith("tcp://*:")
    assert discovery.read_kv_event_sources(recorded("embedding_kv_event_sources")) == ()


def test_kv_events_that_are_off_are_no_source() -> None:
    off = {"0": {"enable_kv_cache_events": False, "publisher": "null"}}
    assert discovery.read_kv_event_sources(off) == ()


def test_sources_come_in_order_of_rank() -> None:
    on = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    assert discovery.read_kv_event_sources({"1": on, "0": on}) == (
        KvEventSource(0, "zmq", "tcp://*:5557", None, ""),
        KvEventSource(1, "zmq", "tcp://*:5557", None, ""),
    )


def test_max_num_seqs_is_read() -> None:
    assert discovery.read_max_num_seqs({"vllm_config": {"scheduler_config": {"max_num_seqs": 64}}}) == 64


@pytest.mark.parametrize(
    ("read", "document"),
    [
        (discovery.read_models, []),
        (discovery.read_models, {"data": {}}),
        (discovery.read_models, {"data": [{"id": 7}]}),
        (discovery.read_models, {"data": [{"id": ""}]}),
        (discovery.read_models, {"data": ["m"]}),
        (discovery.read_models, {"data": [{"id": "m"}] * 10001}),
        (discovery.read_version, {"version": 1}),
        (discovery.read_version, "0.32"),
        (discovery.read_kv_event_sources, {"0": []}),
        (discovery.read_kv_event_sources, {"x": {}}),
        (discovery.read_max_num_seqs, {"vllm_config": "text"}),
        (discovery.read_max_num_seqs, {"vllm_config": {"scheduler_config": {"max_num_seqs": True}}}),
        (discovery.read_max_num_seqs, {"vllm_config": {"scheduler_config": {"max_num_seqs": 0}}}),
    ],
)
def test_other_shapes_are_refused(read: Any, document: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read(document)
