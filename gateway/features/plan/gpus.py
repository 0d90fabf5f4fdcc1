"""GPUs by name: memory, and the speeds that bound decoding and prefill. Models by name, by the config.json of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

from gateway.features.plan.model import PlanError

_NVLINK, _PCIE = 300e9, 25e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data-sheet figures. FLOP/s are dense ones with 16 bits; the link is the rate of one GPU in an exchange."""

    name: str
    memory_gib: float  # that CUDA reports as the total
    _: KW_ONLY
    bytes_per_second: float
    flops: float
    link_bytes_per_second: float
    has_small_defaults: bool = False  # vLLM gives an A100 the limits of a small GPU


_GPUS: Final = (
    Gpu("a10", 22.0, bytes_per_second=600e9, flops=125e12, link_bytes_per_second=_PCIE),
    Gpu("a100", 79.2, bytes_per_second=2.039e12, flops=312e12, link_bytes_per_second=_NVLINK, has_small_defaults=True),
    Gpu(
        "a100-40", 39.4, bytes_per_second=1.555e12, flops=312e12, link_bytes_per_second=_NVLINK, has_small_defaults=True
    ),
    Gpu("b200", 178.4, bytes_per_second=8.0e12, flops=2250e12, link_bytes_per_second=2 * _NVLINK),
    Gpu("h100", 79.2, bytes_per_second=3.35e12, flops=989e12, link_bytes_per_second=_NVLINK),
    Gpu("h100-pcie", 79.2, bytes_per_second=2.0e12, flops=756e12, link_bytes_per_second=_PCIE),
    Gpu("h200", 139.8, bytes_per_second=4.8e12, flops=989e12, link_bytes_per_second=_NVLINK),
    Gpu("l4", 22.0, bytes_per_second=300e9, flops=121e12, link_bytes_per_second=_PCIE),
    Gpu("l40s", 44.4, bytes_per_second=864e9, flops=362e12, link_bytes_per_second=_PCIE),
    Gpu("mi300x", 191.5, bytes_per_second=5.3e12, flops=1307e12, link_bytes_per_second=_NVLINK),
    Gpu("rtx-3090", 23.7, bytes_per_second=936e9, flops=71e12, link_bytes_per_second=_PCIE),
    Gpu("rtx-4090", 23.5, bytes_per_second=1.008e12, flops=165e12, link_bytes_per_second=_PCIE),
    Gpu("rtx-5090", 31.4, bytes_per_second=1.792e12, flops=209e12, link_bytes_per_second=_PCIE),
)
GPUS: Final = MappingProxyType({gpu.name: gpu for gpu in _GPUS})


def gpu_of(name: str) -> Gpu:
    """The GPU of that name, in any case. Raises PlanError that lists the names."""
    found = GPUS.get(name.lower().replace("_", "-"))
    if found is None:
        raise PlanError(f"--gpu {name}: give one of {', '.join(GPUS)}, or --gpu-memory-gib instead")
    return found


def preset(name: str) -> Mapping[str, Any]:
    """The config.json of a model known by name. Raises PlanError that lists the names."""
    known = json.loads(files("gateway.features.plan").joinpath("presets.json").read_text(encoding="utf-8"))
    found = known.get(name.lower())
    if found is None:
        raise PlanError(f"--preset {name}: give one of {', '.join(known)}, or a model's folder or config.json")
    return dict(found)
