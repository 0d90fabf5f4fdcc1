"""Draws a plan: a picture of one GPU's memory, the ways to use the GPUs, and the settings."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gateway.plan.memory import GIB
from gateway.plan.plan import gpu_text

Document = dict[str, Any]
_WIDTH = 64
_PARTS = (
    ("weights", "weights", "█", "blue"),
    ("reserve", "working memory", "▒", "magenta"),
    ("kv_cache", "KV cache", "░", "green"),
    ("left", "not used", "·", "dim"),
)


def as_view(document: Document) -> Group:
    """The plan of a model, or what fits in a running backend."""
    return Group(*(_running_parts(document) if "backend" in document else _parts(document)))


def _parts(document: Document) -> Iterator[RenderableType]:
    yield from _model(document["model"])
    if document["model"]["layers"]:
        yield _requests(document)
    if options := document["options"]:
        chosen = (option for option in options if option["tensor_parallel"] == document["choice"])
        yield from _memory(next(chosen, options[-1]), document)
        yield from _options(document)
    if document["lengths"]:
        yield from _lengths(document, f"one backend on {gpu_text(document['choice'])}")
    yield from _warnings(document)
    if document["vllm"]:
        yield title("To set up")
        yield Padding(Text(document["vllm"], "cyan"), (0, 0, 0, 2))
        yield Padding(Text(document["gateway"].rstrip(), "cyan"), (0, 0, 0, 2))
    if document["assumed"]:
        yield Text(f"\nAssumed: {'; '.join(document['assumed'])}.", "dim")


def _running_parts(document: Document) -> Iterator[RenderableType]:
    model, backend = document["model"], document["backend"]
    yield Text(f"{model['name']} at {backend['url']}", "bold") + Text(
        f", vLLM {model['version'] or '?'}, max_model_len {model['max_model_len']:,}", "default"
    )
    ranks = f" in each of {backend['engines']} engines" if backend["engines"] > 1 else ""
    seqs = backend["max_num_seqs"]
    yield Text(
        f"KV cache: {backend['kv_cache_tokens']:,} tokens{ranks}, in blocks of {document['block_tokens']}; "
        f"max_num_seqs {f'{seqs:,}' if seqs else 'is not told: give --max-num-seqs'}"
    )
    yield _requests(document)
    yield from _lengths(document, "one engine" if backend["engines"] > 1 else "this backend")
    yield from _warnings(document)
    yield title(f"To set up: --max-num-seqs {document['max_num_seqs']}, and")
    yield Padding(Text(document["gateway"].rstrip(), "cyan"), (0, 0, 0, 2))
    yield Text(
        "\nThe size of the KV cache is the backend's own, as it counts for sequences of max_model_len. Of models with "
        "sliding windows, fewer short ones fit.",
        "dim",
    )


def _model(model: Document) -> Iterator[Text]:
    packed = f", {model['quantization']}" if model["quantization"] else ""
    yield Text(model["name"], "bold") + Text(
        f" ({model['family']}): {_count(model['parameters'])} parameters, {model['dtype']}{packed}", "default"
    )
    yield Text(f"Weights: {_gib(model['weight_bytes'])} ({model['weights_from']})")
    if not model["layers"]:
        yield Text("An encoder: it has no KV cache. Batches are bounded by max_num_batched_tokens and max_num_seqs.")
        return
    kinds = " and ".join(
        f"{kind['count']} layers" + (f" with a window of {kind['window_tokens']:,}" if kind["window_tokens"] else "")
        for kind in model["layers"]
    )
    heads = "one latent vector, whole on every GPU" if model["latent"] else f"{model['kv_heads']} KV heads"
    yield Text(
        f"KV cache: {_kib(model['kv_bytes_per_token'])} a token ({kinds}, {heads}), "
        f"{_gib(model['kv_bytes_of_longest'])} for a sequence of {model['max_model_len']:,}"
    )


def _requests(document: Document) -> Text:
    load = document["workload"]
    line = f"Requests: {load['prompt_tokens']:,} + {load['output_tokens']:,} tokens"
    line += " (assumed)" if load["assumed"] else ""
    if load["shared_prefix_tokens"]:
        line += f", the first {load['shared_prefix_tokens']:,} the same in all"
    if load["concurrency"]:
        line += f"; {load['concurrency']:,} at once"
    return Text(line)


def _memory(option: Document, document: Document) -> Iterator[RenderableType]:
    whole, utilization = document["gpus"]["memory_bytes"], document["gpus"]["utilization"]
    sizes = dict(option["gpu_bytes"])
    sizes["left"] = max(0, whole - sizes["weights"] - sizes["reserve"] - sizes["kv_cache"])
    yield title(f"Memory of each GPU: {_gib(whole)}, tensor parallel {option['tensor_parallel']}")
    bar, legend, encoder = Text(), Text(), not document["model"]["layers"]
    used = [min(sizes[key], whole) for key, *_ in _PARTS]
    for width, (key, name, mark, style) in zip(cells(used, _WIDTH), _PARTS, strict=True):
        if sizes[key]:
            bar.append(mark * width, style)
            legend.append(f"{mark} ", style)
            legend.append(f"{'free' if encoder and key == 'kv_cache' else name} {_gib(sizes[key])}  ")
    yield bar
    yield legend
    yield Text(f"--gpu-memory-utilization {utilization:g} lets vLLM use {_gib(option['gpu_bytes']['budget'])}", "dim")


def _options(document: Document) -> Iterator[RenderableType]:
    load = document["workload"]
    tokens = load["prompt_tokens"] + load["output_tokens"]
    yield title(f"Ways to use {gpu_text(document['gpus']['count'])}")
    columns: dict[str, Callable[[Document], str | Text]] = {
        "backends": lambda option: f"{option['replicas']} x tp {option['tensor_parallel']}",
        "weights": lambda option: _gib(option["gpu_bytes"]["weights"]),
    }
    if document["model"]["layers"]:
        columns |= {
            "KV cache": lambda option: _gib(option["gpu_bytes"]["kv_cache"]),
            "KV tokens": lambda option: f"{option['kv_tokens']:,}",
            f"x {tokens:,}": lambda option: f"{option['sequences']:,}",
            "KV tokens, all": lambda option: f"{option['fleet_kv_tokens']:,}",
            "all": lambda option: f"{option['fleet_sequences']:,}",
        }
    table = _table(*columns, "")
    for option in document["options"]:
        table.add_row(*(column(option) for column in columns.values()), _verdict(option, document))
    yield table
    note = "Weights and KV cache are those of each GPU."
    if document["model"]["layers"]:
        note += f" x {tokens:,}: your requests that one backend holds at once, and then all backends."
    if document["cannot_split_by"]:
        note += f" Heads cannot be split by {', '.join(map(str, document['cannot_split_by']))}."
    yield Text(note, "dim")


def _verdict(option: Document, document: Document) -> Text:
    if not option["starts"]:
        cache = document["model"]["layers"] and option["gpu_bytes"]["kv_cache"]
        return Text(f"too small for {document['model']['max_model_len']:,}" if cache else "too small", "red")
    return Text("<- this one", "bold green") if option["tensor_parallel"] == document["choice"] else Text("")


def _lengths(document: Document, where: str) -> Iterator[RenderableType]:
    yield title(f"Batch x cache: sequences that fit at once in {where}")
    has_bytes = document["lengths"][0]["kv_bytes"] is not None
    table = _table("tokens each", *(["KV of one"] if has_bytes else []), "fit at once", "")
    shared = document["workload"]["shared_prefix_tokens"]
    yours = "<- your requests" + (f", {shared:,} tokens of them shared" if shared else "")
    for row in document["lengths"]:
        cells = [f"{row['tokens']:,}", *([_gib(row["kv_bytes"], GIB)] if has_bytes else []), f"{row['sequences']:,}"]
        table.add_row(*cells, yours if row["is_workload"] else "", style="bold" if row["is_workload"] else None)
    yield table
    block, longest = document["block_tokens"], document["model"]["max_model_len"]
    yield Text(
        f"Paged: a sequence takes blocks of {block} tokens as it grows, and wastes {block // 2} on average. With "
        f"max_model_len ({longest:,}) reserved for each, {document['without_paging']:,} would fit, however short.",
        "dim",
    )


def _warnings(document: Document) -> Iterator[RenderableType]:
    if document["warnings"]:
        yield Text("")
    yield from (Text(f"! {warning}", "yellow") for warning in document["warnings"])


def cells(sizes: Sequence[int], width: int) -> list[int]:
    """Cells of each part of a bar: in proportion to its size, at least one if it is not empty."""
    whole = sum(sizes) or 1
    cells = [max(1, round(size / whole * width)) if size else 0 for size in sizes]
    while sum(cells) > width and max(cells) > 1:
        cells[cells.index(max(cells))] -= 1
    return cells


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("backends", "") else "right")
    return table


def title(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"


def _gib(size: int, least: int = GIB // 10) -> str:
    return f"{size / GIB:.1f} GiB" if size >= least else f"{size / (1 << 20):.1f} MiB"


def _kib(size: int) -> str:
    return f"{size / 1024:g} KiB"
