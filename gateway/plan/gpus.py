"""GPUs by name: memory, and the speeds that bound decoding and prefill. Models by name, by the config.json of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

from gateway.plan.model import PlanError

_NVLINK, _PCIE = 300e9, 25e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data-sheet figures. FLOP/s are dense ones with 16 bits; the link is what one GPU reaches in an exchange."""

    name: str
    memory_gib: float  # that CUDA reports as the total
    bytes_per_second: float
    flops: float
    link_bytes_per_second: float
    has_small_defaults: bool = False  # vLLM gives an A100 the limits of a small GPU


_GPUS: Final = (
    Gpu("a10", 22.0, 600e9, 125e12, _PCIE),
    Gpu("a100", 79.2, 2.039e12, 312e12, _NVLINK, has_small_defaults=True),
    Gpu("a100-40", 39.4, 1.555e12, 312e12, _NVLINK, has_small_defaults=True),
    Gpu("b200", 178.4, 8.0e12, 2250e12, 2 * _NVLINK),
    Gpu("h100", 79.2, 3.35e12, 989e12, _NVLINK),
    Gpu("h100-pcie", 79.2, 2.0e12, 756e12, _PCIE),
    Gpu("h200", 139.8, 4.8e12, 989e12, _NVLINK),
    Gpu("l4", 22.0, 300e9, 121e12, _PCIE),
    Gpu("l40s", 44.4, 864e9, 362e12, _PCIE),
    Gpu("mi300x", 191.5, 5.3e12, 1307e12, _NVLINK),
    Gpu("rtx-3090", 23.7, 936e9, 71e12, _PCIE),
    Gpu("rtx-4090", 23.5, 1.008e12, 165e12, _PCIE),
    Gpu("rtx-5090", 31.4, 1.792e12, 209e12, _PCIE),
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
    known = json.loads(files("gateway.plan").joinpath("presets.json").read_text(encoding="utf-8"))
    found = known.get(name.lower())
    if found is None:
        raise PlanError(f"--preset {name}: give one of {', '.join(known)}, or a model's folder or config.json")
    return dict(found)
