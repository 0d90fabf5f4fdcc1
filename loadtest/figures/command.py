"""`loadtest figures`: the page of figures about batching, computed in virtual time."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final

import typer
from rich.console import Console

from gateway import __version__
from loadtest.console import command_line, say
from loadtest.figures import batches, tuning
from loadtest.figures.exhibit import Exhibit
from loadtest.figures.page import page

EXHIBITS: Final = MappingProxyType[str, Callable[[], Exhibit]](
    {
        "batch-curve": batches.batch_curve,
        "memory": batches.memory_ceiling,
        "static": batches.continuous_and_static,
        "concurrency": batches.effective_batch,
        "offline": batches.offline,
        "chunked-prefill": tuning.chunked_prefill,
        "max-num-seqs": tuning.max_num_seqs,
        "tensor-parallel": tuning.tensor_parallel,
        "prefix-caching": tuning.prefix_caching,
        "gpu-utilization": tuning.utilization,
        "all-together": tuning.all_together,
    }
)


def figures(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("figures.html"),
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(EXHIBITS)}; may be repeated.")] = None,
) -> None:
    """Draw what batch size, memory, chunked prefill, splits and prefix caching do, without a GPU, in seconds."""
    unknown = [name for name in only or () if name not in EXHIBITS]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; give some of {', '.join(EXHIBITS)}")
    console, began = Console(), time.perf_counter()
    exhibits = []
    for name in only or EXHIBITS:
        exhibit = EXHIBITS[name]()
        exhibits.append(exhibit)
        say(console, f"{exhibit.title}: {exhibit.verdict}. {exhibit.finding}")
    made = {
        "loadtest": __version__,
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}; no GPU is used",
        "computed in": f"{time.perf_counter() - began:.0f} s",
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(exhibits, made, command_line()), encoding="utf-8")
    say(console, f"wrote {out}", "bold")
