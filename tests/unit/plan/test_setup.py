from itertools import pairwise

import yaml

from gateway.config import parse
from gateway.plan.model_shape import read_shape
from gateway.plan.plan import make_plan
from gateway.plan.setup import gateway_file, serve_command, shell
from tests.unit.plan.models import LLAMA_8B, LLAMA_70B, settings, workload


def test_the_command_has_what_the_plan_decided() -> None:
    plan = make_plan(read_shape(LLAMA_70B), settings(), workload(), 8, (4,))
    assert plan.choice is not None
    words = serve_command(plan, plan.choice, "m", "fp8", "fp8")
    told = dict(pairwise(words))
    assert words[:3] == ["vllm", "serve", "m"]
    assert told["--tensor-parallel-size"] == "4"
    assert told["--max-num-seqs"] == str(plan.choice.max_num_seqs)
    assert told["--max-model-len"] == "8192"
    assert (told["--kv-cache-dtype"], told["--quantization"]) == ("fp8", "fp8")
    assert "--gpu-memory-utilization" not in told
    assert "--block-size" not in told


def test_what_is_vllms_default_is_left_out_and_what_is_not_is_told() -> None:
    plan = make_plan(read_shape(LLAMA_8B), settings(utilization=0.8, block_tokens=32), workload(), 1)
    assert plan.choice is not None
    words = serve_command(plan, plan.choice, "m", "auto", "int4")
    told = dict(pairwise(words))
    assert (told["--gpu-memory-utilization"], told["--block-size"]) == ("0.8", "32")
    assert not {"--tensor-parallel-size", "--kv-cache-dtype", "--quantization"} & set(words)


def test_a_shell_can_take_it() -> None:
    assert shell(["vllm", "serve", "my model", "--a", "1", "--b"]) == "vllm serve 'my model' \\\n    --a 1 \\\n    --b"


def test_the_gateway_takes_its_file() -> None:
    config = parse(yaml.safe_load(gateway_file(2, 285)))
    assert [backend.max_in_flight for backend in config.backends] == [285, 285]
    assert parse(yaml.safe_load(gateway_file(1, 3, "http://h:1"))).backends[0].url == "http://h:1"
