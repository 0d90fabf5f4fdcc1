"""What to write down once a plan is made: vLLM's command line, and the gateway's file."""

import shlex

from gateway.plan.kv import default_block_tokens
from gateway.plan.memory import UTILIZATION
from gateway.plan.plan import Option, Plan


def serve_command(plan: Plan, choice: Option, model: str, kv_cache_dtype: str, quantization: str) -> list[str]:
    """The arguments of one backend."""
    settings, words = plan.settings, ["vllm", "serve", model]
    if choice.fit.tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(choice.fit.tensor_parallel)]
    words += ["--max-num-seqs", str(choice.max_num_seqs), "--max-model-len", str(settings.max_length_tokens)]
    if settings.utilization != UTILIZATION:
        words += ["--gpu-memory-utilization", f"{settings.utilization:g}"]
    if settings.block_tokens != default_block_tokens(plan.shape):
        words += ["--block-size", str(settings.block_tokens)]
    if kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", kv_cache_dtype]
    if quantization == "fp8":  # the others are made beforehand, and found in the checkpoint
        words += ["--quantization", "fp8"]
    return [*words, "--enable-prompt-tokens-details", "--shutdown-timeout", "600"]


def shell(words: list[str]) -> str:
    """The command for a shell, an option a line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(shlex.join(line) for line in lines)


def gateway_file(replicas: int, max_in_flight: int, url: str | None = None) -> str:
    """The section of the gateway's file."""
    urls = [url] if url else [f"http://HOST-{number}:8000" for number in range(1, replicas + 1)]
    lines = [f'  - {{url: "{each}", max_in_flight: {max_in_flight}}}' for each in urls]
    return "\n".join(["backends:", *lines]) + "\n"
