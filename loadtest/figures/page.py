"""All exhibits on one page that needs no network, with their inputs, and recommendations. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import orjson

from loadtest.engine.step_time import HOST_SECONDS, PRESETS, kv_tokens
from loadtest.figures.exhibit import Exhibit
from loadtest.report.document import render

_ADVICE = (
    ("Serve with continuous batching", "vLLM has it; loadtest sim --batching static shows the other way"),
    ("Plan max_num_seqs by memory and concurrency", "gateway plan --preset llama-3.1-8b --gpu h100 --concurrency 200"),
    ("Measure the batch curve of your engine", "loadtest run URL -c 1,8,32"),
    ("Keep chunked prefill on; tune the tokens of a step", "vllm serve ... --max-num-batched-tokens 2048, 4096, 8192"),
    ("Try configurations one after the other", "loadtest sweep plan.yaml"),
    ("Split only what does not fit, or must be fast alone", "gateway plan --gpus 4 compares the splits"),
    ("Put shared prefixes first, and keep caching on", "gateway prefixes shows what breaks them"),
    ("Look at GPU utilisation and at tokens/s", "loadtest run samples the GPUs; below 85 % raise the concurrency"),
    ("Write down what was tested", "loadtest run --out keeps checkpoint.md; loadtest verify checks it"),
)


def page(exhibits: Sequence[Exhibit], made: Mapping[str, str], command: str) -> str:
    """`made`: inputs of the figures, in addition to the ones known here."""
    charts = [chart for exhibit in exhibits for chart in exhibit.charts]
    first, sections = 0, []
    for exhibit in exhibits:
        sections.append((exhibit, first))
        first += len(exhibit.charts)
    return render(
        "figures.html",
        "What batching does",
        "Batch size, memory, chunked prefill, tensor parallelism and prefix caching, computed without a GPU",
        charts,
        exhibits=exhibits,
        sections=sections,
        advice=_ADVICE,
        made=[*made.items(), *_engines(), ("figures, SHA-256", digest(exhibits))],
        command=command,
    )


def digest(exhibits: Sequence[Exhibit]) -> str:
    """Of all tables: the same version computes the same figures on every machine."""
    tables = [[exhibit.name, exhibit.finding, exhibit.rows] for exhibit in exhibits]
    return hashlib.sha256(orjson.dumps(tables)).hexdigest()[:16]


def _engines() -> list[tuple[str, str]]:
    formula = f"a + b x prompt tokens + c x sequences + d x KV tokens; {HOST_SECONDS * 1e3:g} ms of a are the host's"
    shown = [("a step's time", formula)]
    for name, time in PRESETS.items():
        if name != "cpu-tiny":
            coefficients = (
                f"a {time.base_seconds * 1e3:g} ms, b {time.per_prefill_token_seconds * 1e6:g} us, "
                f"c {time.per_decode_sequence_seconds * 1e6:g} us, d {time.per_context_token_seconds * 1e9:g} ns"
            )
            matrix = f", {time.matrix_seconds * 1e3:g} ms more from 2 sequences on" if time.matrix_seconds else ""
            shown.append((f"{name}, Llama 3.1 8B", f"{coefficients}{matrix}; {kv_tokens(name):,} KV tokens"))
    return shown
