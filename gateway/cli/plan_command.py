"""`gateway plan`: its options."""

from typing import Annotated, Literal

import typer
from typer import Argument, Option

from gateway.cli.terminal import INVALID, fail, show

Packing = Annotated[
    Literal["auto", "none", "fp8", "int8", "int4"], Option(help="Quantization of the weights; auto = from config.json.")
]


def add_to(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    model: Annotated[
        str, Argument(help="A model's folder, its config.json, or the URL of a running backend.", metavar="MODEL")
    ] = "",
    preset: Annotated[str | None, Option(help="A model by its name, such as llama-3.1-8b, instead of MODEL.")] = None,
    gpu: Annotated[str | None, Option(help="Name of the GPU, such as h100: its memory and its speed.")] = None,
    gpu_memory_gib: Annotated[float | None, Option(min=1, help="Memory of one GPU in GiB.")] = None,
    gpus: Annotated[int, Option(min=1, help="Number of GPUs.")] = 1,
    tensor_parallel_size: Annotated[
        int | None, Option(min=1, help="As in vLLM.", show_default="1, 2, 4 and 8 are compared")
    ] = None,
    pipeline_parallel_size: Annotated[int, Option(min=1, help="As in vLLM.")] = 1,
    gpu_memory_utilization: Annotated[float, Option(min=0.01, max=1, help="As in vLLM.")] = 0.92,
    max_model_len: Annotated[int | None, Option(min=1, help="As in vLLM.", show_default="the model's")] = None,
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], Option(help="As in vLLM.")] = "auto",
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "bfloat16", "float16"], Option(help="As in vLLM.")] = "auto",
    quantization: Packing = "auto",
    concurrency: Annotated[int | None, Option(min=1, help="Expected concurrent requests.")] = None,
    prompt_tokens: Annotated[int | None, Option(min=0, help="Per request.", show_default="1024")] = None,
    output_tokens: Annotated[int | None, Option(min=0, help="Per request.", show_default="256")] = None,
    shared_prefix_tokens: Annotated[
        int, Option(min=0, help="Tokens at the start that all prompts share, such as a system prompt.")
    ] = 0,
    max_num_seqs: Annotated[int | None, Option(min=1, help="The value vLLM runs with, to check it.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, Option(min=1, help="As in vLLM.", show_default="vLLM's default for the GPU")
    ] = None,
    block_size: Annotated[int | None, Option(min=1, help="As in vLLM.", show_default="16")] = None,
    reserve_gib: Annotated[
        float | None,
        Option(min=0, help="GPU memory in GiB needed beside weights and KV cache.", show_default="estimated"),
    ] = None,
    fields: Annotated[
        list[str] | None, Option("--set", help="Value of a field that config.json lacks; repeatable.", metavar="F=N")
    ] = None,
    api_key: Annotated[str, Option(help="API key of the running backend.", envvar="VLLM_API_KEY")] = "",
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the GPU memory that a model needs, how many requests fit by length, and which settings to use."""
    from gateway.features.plan.command import PlanRequest, ask_running, plan_model, running_document, workload_of
    from gateway.features.plan.model import PlanError

    try:
        workload = workload_of(prompt_tokens, output_tokens, shared_prefix_tokens, concurrency)
        if model.startswith(("http://", "https://")):
            document = running_document(model, ask_running(model, api_key), workload, max_num_seqs)
        else:
            request = PlanRequest(
                model,
                gpu_memory_gib=gpu_memory_gib,
                gpus=gpus,
                tensor_parallel=tensor_parallel_size,
                utilization=gpu_memory_utilization,
                max_model_len=max_model_len,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                quantization=quantization,
                max_num_seqs=max_num_seqs,
                batched_tokens=max_num_batched_tokens,
                block_tokens=block_size,
                reserve_gib=reserve_gib,
                fields=tuple(fields or ()),
                preset=preset,
                gpu=gpu,
                pipeline_parallel=pipeline_parallel_size,
            )
            document = plan_model(request, workload)
    except PlanError as error:
        fail(str(error), INVALID)
    show(document, json, "plan.jinja")
