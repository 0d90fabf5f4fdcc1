"""What exporters report of GPUs on a page for Prometheus: NVIDIA's DCGM exporter, and AMD's device metrics exporter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from loadtest.report.schema import GpuSeries

# Utilisation in percent, memory in MiB, power in watts. Some installations put amd_ before AMD's names.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "utilization_percent": ("DCGM_FI_DEV_GPU_UTIL", "gpu_gfx_activity"),
    "memory_used_mib": ("DCGM_FI_DEV_FB_USED", "gpu_used_vram"),
    "memory_free_mib": ("DCGM_FI_DEV_FB_FREE", "gpu_free_vram"),
    "memory_total_mib": ("DCGM_FI_DEV_FB_TOTAL", "gpu_total_vram"),
    "power_watts": ("DCGM_FI_DEV_POWER_USAGE", "gpu_package_power", "gpu_average_package_power"),
}
_KEYS = {name: key for key, names in _NAMES.items() for name in names}
_SAMPLE = re.compile(rf"^(?:amd_)?({'|'.join(_KEYS)})\{{(.*)\}}[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_NUMBER, _MODEL, _HOST = ("gpu", "gpu_id"), ("modelName", "card_series", "card_model"), ("Hostname", "hostname")
_MOST_GPUS = 256


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment; None for what its exporter does not report."""

    name: str
    utilization_percent: float | None = None
    memory_used_mib: float | None = None
    _: KW_ONLY
    memory_total_mib: float | None = None
    power_watts: float | None = None


def gpu_readings(page: str) -> list[GpuReading]:
    """All GPUs of the page, by host and number; none on a page without any. Raises ValueError."""
    found: dict[str, dict[str, float]] = {}
    for metric, text, value in _SAMPLE.findall(page):
        labels = dict(_LABEL.findall(text))
        values = found.setdefault(_name(labels), {})
        values.setdefault(_KEYS[metric], float(value))
        if len(found) > _MOST_GPUS:
            raise ValueError(f"more than {_MOST_GPUS} GPUs on one page")
    return [_reading(name, values) for name, values in sorted(found.items())]


def keep_gpus(series: dict[str, GpuSeries], at: float, page: str, readings: list[GpuReading]) -> None:
    """Adds one moment; a GPU that is not reported then has a gap there."""
    for one in readings:
        known = series.get(one.name)
        if known is None:
            name = f"{page} {one.name}".strip()
            known = series[one.name] = GpuSeries(name=name, driver="", memory_total_mib=one.memory_total_mib)
        known.at.append(at)
        known.utilization_percent.append(one.utilization_percent)
        known.memory_used_mib.append(one.memory_used_mib)
        known.power_watts.append(one.power_watts)


def _name(labels: Mapping[str, str]) -> str:
    """The GPU's number, model and host, as far as they are known."""
    parts = (next((labels[name] for name in names if labels.get(name)), "") for names in (_NUMBER, _MODEL, _HOST))
    return " ".join(filter(None, parts))


def _reading(name: str, values: Mapping[str, float]) -> GpuReading:
    used, free = values.get("memory_used_mib"), values.get("memory_free_mib")
    total = values.get("memory_total_mib", used + free if used is not None and free is not None else None)
    return GpuReading(
        name, values.get("utilization_percent"), used, memory_total_mib=total, power_watts=values.get("power_watts")
    )
