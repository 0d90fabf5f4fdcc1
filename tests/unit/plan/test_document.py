import shlex
from itertools import pairwise

import orjson
import yaml

from gateway.config.file import parse
from gateway.core.backends.facts import Facts, ModelCard
from gateway.features.plan.capacity import make_plan
from gateway.features.plan.command import gateway_file, plan_document, running_document, serve_command
from gateway.features.plan.model import read_shape
from tests.unit.plan.models import GEMMA3_27B, LLAMA_8B, LLAMA_70B, MINILM, Config, settings, workload


def document(config: Config, gpus: int = 8, gpu_gib: float = 80, **load: int) -> dict[str, object]:
    plan = make_plan(read_shape(config), settings(gpu_gib), workload(**load), gpus)
    return plan_document(plan, ["w"], model="m", weights_from="s", command="c")


def test_a_document_is_json_with_sizes_in_bytes() -> None:
    found = orjson.loads(orjson.dumps(document(LLAMA_8B)))
    assert found["model"]["kv_bytes_per_token"] == 131072
    assert found["model"]["weight_bytes"] == 2 * 8_030_261_248
    assert [option["tensor_parallel"] for option in found["options"]] == [1, 2, 4, 8]
    one = found["options"][0]
    assert one["gpu_bytes"]["kv_cache"] == sum(one["gpu_bytes"][key] * sign for key, sign in
                                               (("budget", 1), ("weights", -1), ("reserve", -1)))  # fmt: skip
    assert one["fleet_kv_tokens"] == 8 * one["kv_tokens"]
    assert found["choice"] == 1
    assert found["warnings"] == ["w"]
    assert found["without_paging"] == one["kv_tokens"] // 8192
    assert found["assumed"] == ["working memory (--reserve-gib sets it)", "weights, counted from config.json"]


def test_what_does_not_fit_has_neither_lengths_nor_a_choice() -> None:
    found = document(LLAMA_70B, gpus=1)
    assert (found["choice"], found["lengths"], found["gateway"]) == (None, [], None)


def test_an_encoder_has_no_lengths() -> None:
    found = document(MINILM, gpus=1)
    assert found["choice"] == 1
    assert found["lengths"] == []
    assert found["without_paging"] is None


def test_splits_that_heads_do_not_allow_are_named() -> None:
    assert document(LLAMA_8B | {"num_attention_heads": 12, "num_key_value_heads": 4})["cannot_split_by"] == [8]


def test_what_is_assumed_is_listed() -> None:
    shape = read_shape(GEMMA3_27B | {"quantization_config": {"quant_method": "new"}})
    plan = make_plan(shape, settings(quantization=shape.quantization), workload(assumed=True), 1)
    found = plan_document(plan, [], model="m", weights_from="s", command=None)
    assert found["assumed"] == [
        "working memory (--reserve-gib sets it)",
        "weights, counted from config.json",
        "no weights for what sees or hears",
        "weights as if unpacked: new is not known",
        "lengths of requests (--prompt-tokens, --output-tokens)",
    ]
    options = make_plan(shape, settings(reserve_bytes=1, weight_bytes=1), workload(), 1)
    assert plan_document(options, [], model="m", weights_from="s", command=None)["assumed"] == []


def test_a_running_backends_engines_share_its_cap() -> None:
    facts = Facts(
        "0.33.0", (ModelCard("m", max_model_len=8192),), block_size_tokens=16, kv_cache_tokens=200_000, engines=2
    )
    found = running_document("http://h:1", facts, workload(), None)
    assert found["max_num_seqs"] == 97
    assert found["without_paging"] == 12
    assert f"max_in_flight: {2 * found['max_num_seqs']}" in found["gateway"]
    assert [row["sequences"] for row in found["lengths"]] == [195, 97, 48, 12]


def test_the_command_has_what_the_plan_decided() -> None:
    plan = make_plan(read_shape(LLAMA_70B), settings(), workload(), 8, (4,))
    assert plan.choice is not None
    words = shlex.split(serve_command(plan, plan.choice, "m", "fp8", "fp8"))
    options = dict(pairwise(words))
    assert words[:3] == ["vllm", "serve", "m"]
    assert options["--tensor-parallel-size"] == "4"
    assert options["--max-num-seqs"] == str(plan.choice.max_num_seqs)
    assert options["--max-model-len"] == "8192"
    assert (options["--kv-cache-dtype"], options["--quantization"]) == ("fp8", "fp8")
    assert "--gpu-memory-utilization" not in options
    assert "--block-size" not in options


def test_the_command_has_only_what_is_not_vllms_default() -> None:
    plan = make_plan(read_shape(LLAMA_8B), settings(utilization=0.8, block_tokens=32), workload(), 1)
    assert plan.choice is not None
    words = shlex.split(serve_command(plan, plan.choice, "m", "auto", "int4"))
    options = dict(pairwise(words))
    assert (options["--gpu-memory-utilization"], options["--block-size"]) == ("0.8", "32")
    assert not {"--tensor-parallel-size", "--kv-cache-dtype", "--quantization"} & set(words)


def test_a_shell_can_take_it() -> None:
    plan = make_plan(read_shape(LLAMA_8B), settings(), workload(), 1)
    assert plan.choice is not None
    assert serve_command(plan, plan.choice, "my model", "auto", "auto").splitlines() == [
        "vllm serve 'my model' \\",
        f"    --max-num-seqs {plan.choice.max_num_seqs} \\",
        "    --max-model-len 8192 \\",
        "    --enable-prompt-tokens-details \\",
        "    --shutdown-timeout 600",
    ]


def test_the_gateway_takes_its_file() -> None:
    config = parse(yaml.safe_load(gateway_file(2, 285)))
    assert [backend.max_in_flight for backend in config.backends] == [285, 285]
    assert parse(yaml.safe_load(gateway_file(1, 3, "http://h:1"))).backends[0].url == "http://h:1"
