from io import StringIO
from typing import Any

from rich.console import Console, RenderableType

from gateway.cli.pages import page
from gateway.core.backends.facts import Facts, ModelCard
from gateway.features.plan.capacity import make_plan
from gateway.features.plan.command import plan_document, running_document
from gateway.features.plan.model import read_shape
from tests.unit.plan.models import DEEPSEEK_V3, GEMMA3_27B, LLAMA_8B, LLAMA_70B, MINILM, Config, settings, workload


def shown(view: RenderableType, width: int = 120) -> str:
    sink = StringIO()
    Console(file=sink, width=width).print(view)
    return sink.getvalue()


def view_of(config: Config, gpus: int = 8, warnings: tuple[str, ...] = (), **load: Any) -> str:
    shape = read_shape(config)
    plan = make_plan(shape, settings(quantization=shape.quantization), workload(**load), gpus)
    command = "vllm serve m" if plan.choice else None
    return shown(
        page("plan.jinja", plan_document(plan, list(warnings), model="m", weights_from="counted", command=command))
    )


def test_the_model_is_described_in_words() -> None:
    text = view_of(LLAMA_8B)
    assert "m (llama): 8.0 billion parameters, bfloat16" in text
    assert "Weights: 15.0 GiB (counted)" in text
    assert "KV cache: 128 KiB a token (32 layers, 8 KV heads), 1.0 GiB for a sequence of 8,192" in text


def test_the_bar_shows_a_gpus_memory_by_size() -> None:
    [bar] = [line for line in view_of(LLAMA_8B).splitlines() if line.startswith("█") and "weights" not in line]
    assert len(bar.rstrip()) == 64
    assert [bar.count(mark) for mark in "█▒░·"] == [12, 3, 44, 5]
    assert "█ weights 15.0 GiB  ▒ working memory 3.4 GiB  ░ KV cache 55.3 GiB  · not used 6.4 GiB" in view_of(LLAMA_8B)


def test_the_way_to_take_is_marked() -> None:
    lines = view_of(LLAMA_8B).splitlines()
    [marked] = [line for line in lines if "<- this one" in line]
    assert marked.startswith("8 x tp 1")
    assert len([line for line in lines if " x tp " in line and "GiB" in line]) == 4


def test_the_own_requests_are_marked_among_the_lengths() -> None:
    text = view_of(LLAMA_8B, shared_prefix_tokens=512, concurrency=7)
    assert "Requests: 1,000 + 24 tokens, the first 512 the same in all; 7 at once" in text
    [marked] = [line for line in text.splitlines() if "<- your requests, 512 tokens of them shared" in line]
    assert marked.startswith("      1,024")


def test_what_does_not_fit_is_shown_with_what_would() -> None:
    text = view_of(LLAMA_70B, 1, ("take two",))
    assert "too small" in text
    assert "! take two" in text
    assert "To set up" not in text
    assert "Batch x cache" not in text


def test_a_plan_that_was_made_ends_with_what_to_write_down() -> None:
    text = view_of(LLAMA_8B, 2)
    assert text.index("To set up") < text.index("vllm serve m") < text.index("backends:") < text.index("Assumed:")
    assert text.count("max_in_flight") == 2


def test_latent_and_windowed_caches_are_shown() -> None:
    assert "68.625 KiB a token (61 layers, one latent vector, whole on every GPU)" in view_of(DEEPSEEK_V3)
    assert "10 layers and 52 layers with a window of 1,024, 16 KV heads" in view_of(GEMMA3_27B)


def test_an_encoder_has_no_cache() -> None:
    text = view_of(MINILM, 2)
    assert "An encoder: it has no KV cache." in text
    assert "░ free " in text
    assert "KV tokens" not in text


def test_nothing_is_wider_than_the_terminal() -> None:
    plan = make_plan(read_shape(LLAMA_8B), settings(), workload(), 8)
    view = page("plan.jinja", plan_document(plan, ["w " * 100], model="m", weights_from="c", command="vllm serve m"))
    assert max(map(len, shown(view, 80).splitlines())) <= 80


def test_a_running_backend_is_shown_by_its_own_figures() -> None:
    facts = Facts(
        "0.33.0",
        (ModelCard("m", max_model_len=8192),),
        block_size_tokens=16,
        kv_cache_tokens=200_000,
        max_num_seqs=64,
        engines=2,
    )
    text = shown(page("plan.jinja", running_document("http://h:1", facts, workload(concurrency=10), None)))
    assert "m at http://h:1, vLLM 0.33.0, max_model_len 8,192" in text
    assert "KV cache: 100,000 tokens in each of 2 engines, in blocks of 16; max_num_seqs 64" in text
    assert "sequences that fit at once in one engine" in text
    assert "! The effective batch is the active concurrency" in text
    assert '{url: "http://h:1", max_in_flight: 128}' in text
