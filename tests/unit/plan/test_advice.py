from gateway.features.plan.capacity import Plan, Workload, advice, make_plan, shortened, warnings
from gateway.features.plan.model import read_shape
from tests.unit.plan.models import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, MINILM, settings, workload

LLAMA = read_shape(LLAMA_8B)


def plan_for(load: Workload, gpus: int = 8) -> Plan:
    return make_plan(LLAMA, settings(), load, gpus)


def test_a_plan_without_surprises_has_no_warning() -> None:
    assert warnings(plan_for(workload()), None) == []
    assert warnings(make_plan(read_shape(MINILM), settings(), workload(concurrency=5), 1), None) == []


def test_more_slots_than_the_cache_holds_would_preempt() -> None:
    [line] = advice(workload(), 8192, 300, 285, 1024, 1)
    assert "max_num_seqs 1,024 is more than the 300 sequences of 1,024 tokens" in line
    assert "preempt" in line
    assert "Set it to 285." in line


def test_far_fewer_slots_leave_the_cache_unused() -> None:
    [line] = advice(workload(), 8192, 300, 64, 64, 1)
    assert "leaves KV cache unused: it holds 300" in line
    assert list(advice(workload(), 8192, 300, 285, 285, 1)) == []
    assert list(advice(workload(), 8192, 300, 285, None, 1)) == []


def test_the_effective_batch_is_the_active_concurrency() -> None:
    [line] = advice(workload(concurrency=41), 8192, 335, 335, None, 8)
    assert line.startswith("The effective batch is the active concurrency")
    assert "each of 8 backends decodes 6 together, whatever max_num_seqs is (335)" in line


def test_more_requests_than_places_wait_in_the_line() -> None:
    [line] = advice(workload(concurrency=1000), 8192, 335, 335, None, 2)
    assert "670 have a place: about 330 wait in the gateway's line" in line
    assert list(advice(workload(concurrency=670), 8192, 335, 335, None, 2)) == []
    assert list(advice(workload(), 8192, 335, 335, None, 2)) == []


def test_fewer_sufficient_gpus_are_recommended() -> None:
    found = warnings(plan_for(workload(concurrency=40)), None)
    assert any(line.startswith("1 GPU (1 x tp 1) would hold 40 at once") for line in found)


def test_gpus_that_lack_are_counted() -> None:
    load = workload(concurrency=9000)
    plan = plan_for(load)
    [line] = [line for line in warnings(plan, None) if line.startswith("To hold all 9,000")]
    fewest = min(-(-9000 // option.max_num_seqs) * option.tensor_parallel for option in plan.options)
    assert f"takes {fewest} GPUs" in line


def test_requests_longer_than_the_engine_takes_are_a_warning() -> None:
    assert list(advice(workload(8190), 8192, 300, 300, None, 1)) != []
    assert list(advice(workload(8168), 8192, 300, 300, None, 1)) == []


def test_a_length_above_the_models_own_is_a_warning() -> None:
    plan = make_plan(LLAMA, settings(max_length_tokens=200_000), workload(), 1)
    assert "more than the model's own 131,072" in warnings(plan, None)[0]


def test_a_model_that_does_not_fit_says_what_would() -> None:
    what, ways = warnings(make_plan(read_shape(LLAMA_70B), settings(), workload(), 1), None)
    assert what.startswith("It does not fit on 1 GPU: each would need 131.4 GiB for weights")
    assert ways == "It fits on 2 GPUs (tensor parallel 2); or as a 4-bit checkpoint (AWQ, GPTQ) on 1 GPU."
    what, ways = warnings(make_plan(read_shape(LLAMA_70B), settings(48), workload(), 2), None)
    assert what.startswith("It does not fit on 2 GPUs")
    assert "or with --quantization fp8 on 2 GPUs" in ways
    packed = read_shape(DEEPSEEK_V3)
    asked = settings(block_tokens=64, quantization=packed.quantization)
    _, ways = warnings(make_plan(packed, asked, workload(), 8), None)
    assert ways == "It fits on 16 GPUs (tensor parallel 16)."


def test_a_length_that_does_not_fit_says_which_would() -> None:
    what, ways = warnings(make_plan(LLAMA, settings(24, max_length_tokens=131072), workload(), 1), None)
    assert what.startswith("vLLM does not start on 1 GPU: one sequence of 131,072 tokens needs 16.0 GiB")
    assert ways.startswith("It fits with --max-model-len ")


def test_where_nothing_helps_that_is_said() -> None:
    _, ways = warnings(make_plan(read_shape(DEEPSEEK_V3), settings(1), workload(), 1), None)
    assert ways == "Nothing simple makes it fit: take larger GPUs."


def test_heads_that_cannot_be_split_are_a_warning() -> None:
    plan = make_plan(LLAMA, settings(), workload(), 8, (3,))
    assert warnings(plan, None) == ["32 attention heads cannot be split over 8 GPUs in a way that vLLM knows."]


def test_a_plan_for_a_shorter_length_says_so_and_what_gives_the_whole() -> None:
    plan = make_plan(LLAMA, settings(24, max_length_tokens=131072), workload(), 1)
    line = shortened(plan, 41984)
    assert "the model's own 131,072 tokens" in line
    assert "--max-model-len 41984" in line
    assert "on 2 GPUs (tensor parallel 2)" in line
