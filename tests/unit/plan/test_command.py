import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.__main__ import app
from gateway.features.plan.command import (
    PlanRequest,
    ask_running,
    plan_model,
    running_document,
    with_fields,
    workload_of,
)
from gateway.features.plan.model import PlanError
from tests.unit.plan.models import DEEPSEEK_V3, GEMMA3_4B, GPT_OSS_20B, LLAMA_8B, Config
from tests.unit.plan.test_running import engine, metrics, serving

ASKED = PlanRequest(
    "",
    gpu_memory_gib=80.0,
    gpus=1,
    tensor_parallel=None,
    utilization=0.92,
    max_model_len=None,
    dtype="auto",
    kv_cache_dtype="auto",
    quantization="auto",
    max_num_seqs=None,
    batched_tokens=None,
    block_tokens=None,
    reserve_gib=None,
    fields=(),
)
TYPICAL = workload_of(None, None, 0, None)


def planned(tmp_path: Path, config: Config, **asked: Any) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return plan_model(replace(ASKED, model=str(tmp_path), **asked), TYPICAL)


def gateway(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_a_plan_has_vllms_defaults_and_typical_requests(tmp_path: Path) -> None:
    found = planned(tmp_path, LLAMA_8B)
    assert found["workload"]["prompt_tokens"] + found["workload"]["output_tokens"] == 1280
    assert found["workload"]["assumed"]
    assert (found["block_tokens"], found["max_num_batched_tokens"]) == (16, 8192)
    assert found["options"][0]["gpu_bytes"]["budget"] == int(80 * 0.92 * 2**30)
    assert "--max-model-len 131072" in found["vllm"]


def test_a_length_that_has_no_room_is_cut_unless_it_was_asked_for(tmp_path: Path) -> None:
    found = planned(tmp_path, LLAMA_8B, gpu_memory_gib=24.0)
    assert found["model"]["max_model_len"] < 50_000
    assert found["choice"] == 1
    assert f"--max-model-len {found['model']['max_model_len']}" in found["warnings"][0]
    asked = planned(tmp_path, LLAMA_8B, gpu_memory_gib=24.0, max_model_len=131072)
    assert asked["choice"] is None


def test_a_backend_that_holds_more_than_vllms_default_is_given_no_more(tmp_path: Path) -> None:
    many = engine(**{"/metrics": metrics(tokens="1000000")})
    with serving(many) as url:
        document = running_document(url, ask_running(url), workload_of(64, 64, 0, None), None)
    assert document["max_num_seqs"] == 1024


def test_a_packed_cache_holds_twice_as_much(tmp_path: Path) -> None:
    plain, packed = (planned(tmp_path, LLAMA_8B, kv_cache_dtype=dtype)["options"][0] for dtype in ("auto", "fp8"))
    assert packed["kv_tokens"] == pytest.approx(2 * plain["kv_tokens"], rel=1e-3)
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    by_file = planned(tmp_path, LLAMA_8B | {"quantization_config": scheme})
    assert by_file["model"]["kv_bytes_per_token"] == 64 * 1024


def test_packing_weights_leaves_more_cache(tmp_path: Path) -> None:
    sizes = [
        planned(tmp_path, LLAMA_8B, quantization=name)["model"]["weight_bytes"] for name in ("auto", "fp8", "int4")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert "--quantization fp8" in planned(tmp_path, LLAMA_8B, quantization="fp8")["vllm"]
    mixed = planned(tmp_path, GPT_OSS_20B)["model"]
    assert mixed["quantization"] == "mxfp4"
    assert mixed["weight_bytes"] < 16e9


def test_kernels_for_latent_vectors_get_their_block_size(tmp_path: Path) -> None:
    found = planned(tmp_path, DEEPSEEK_V3, gpu_memory_gib=141.0, gpus=8)
    assert found["block_tokens"] == 64
    assert "--block-size" not in found["vllm"]


def test_max_num_seqs_is_checked_and_kept_if_it_fits(tmp_path: Path) -> None:
    assert planned(tmp_path, LLAMA_8B, max_num_seqs=200)["options"][0]["max_num_seqs"] == 200
    assert "will preempt" in planned(tmp_path, LLAMA_8B, max_num_seqs=2000)["warnings"][0]


def test_a_split_can_be_asked_for(tmp_path: Path) -> None:
    found = planned(tmp_path, LLAMA_8B, gpus=8, tensor_parallel=2)
    assert [option["tensor_parallel"] for option in found["options"]] == [2]
    with pytest.raises(PlanError, match="give --gpus 4"):
        planned(tmp_path, LLAMA_8B, gpus=2, tensor_parallel=4)
    with pytest.raises(PlanError, match="cannot split 32 attention heads"):
        planned(tmp_path, LLAMA_8B, gpus=8, tensor_parallel=3)


def test_missing_fields_can_be_given() -> None:
    assert with_fields(LLAMA_8B, ()) is LLAMA_8B
    assert with_fields({"n": 1}, ("head_dim=128",))["head_dim"] == 128
    changed = with_fields(GEMMA3_4B, ("num_attention_heads=16",))
    assert (changed["num_attention_heads"], changed["num_hidden_layers"]) == (16, 34)
    assert "vision_config" in changed


@pytest.mark.parametrize("assignment", ["head_dim", "=3", "head_dim=", "head_dim=x", "head_dim=-1"])
def test_what_is_no_field_and_number_is_refused(assignment: str) -> None:
    with pytest.raises(PlanError, match="such as head_dim=128"):
        with_fields(LLAMA_8B, (assignment,))


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(PlanError, match="belongs to the prompt"):
        workload_of(10, None, 20, None)
    with pytest.raises(PlanError, match="both 0"):
        workload_of(0, 0, 0, None)
    assert workload_of(None, None, 5000, None).prompt_tokens == 5000


def test_a_running_backend_is_compared_with_what_it_was_started_with() -> None:
    with serving(engine()) as url:
        document = running_document(url, ask_running(url), workload_of(None, None, 0, 10), 128)
    assert document["max_num_seqs"] == 3125 // 40
    assert document["backend"]["max_num_seqs"] == 128
    preempts, batch = document["warnings"]
    assert "will preempt" in preempts
    assert "the backend decodes 10 together" in batch


def test_the_command_prints_a_plan_and_its_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    result = gateway(str(tmp_path), "--gpu-memory-gib", "80", "--gpus", "8")
    assert result.exit_code == 0
    assert "Ways to use 8 GPUs" in result.stdout
    document = json.loads(gateway(str(tmp_path), "--gpu-memory-gib", "80", "--gpus", "8", "--json").stdout)
    assert [option["replicas"] for option in document["options"]] == [8, 4, 2, 1]


def test_the_command_plans_a_running_backend() -> None:
    with serving(engine()) as url:
        result = gateway(url)
    assert result.exit_code == 0
    assert "KV cache: 100,000 tokens" in result.stdout


def test_the_command_says_in_one_line_what_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "new", "hidden_size": 1024}')
    result = gateway(str(tmp_path), "--gpu-memory-gib", "80")
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("gateway: the model's config.json lacks num_hidden_layers")
    assert "give --gpu-memory-gib" in gateway(str(tmp_path)).stderr
    assert "127.0.0.1:8000 is not there: give a model's folder" in gateway("127.0.0.1:8000").stderr
