"""How a checkpoint's weights are packed."""

from dataclasses import dataclass
from typing import Any

_SCALE_BITS = 16
_GROUP = 128


@dataclass(frozen=True, slots=True)
class Quantization:
    """Bits of one weight of a linear layer, scales included; embeddings and the output layer stay as they are."""

    name: str
    bits: float
    experts_only: bool = False
    kv_cache_fp8: bool = False
    known: bool = True  # False: nothing is known of this method, weights are counted as if unpacked


def chosen(name: str, found: Quantization | None) -> Quantization | None:
    """What the command line asks for; auto = what the checkpoint has."""
    keeps_fp8_cache = found is not None and found.kv_cache_fp8
    bits = {"fp8": 8.0, "int8": 8.0, "int4": 4 + (_SCALE_BITS + 4) / _GROUP}
    if name == "auto":
        return found
    return Quantization(name, bits[name], kv_cache_fp8=keeps_fp8_cache) if name in bits else None


def read_quantization(section: Any) -> Quantization | None:
    """The section `quantization_config` of config.json."""
    if not isinstance(section, dict):
        return None
    method = str(section.get("quant_method") or section.get("quant_algo") or "unknown").lower()
    fp8_cache = _has_fp8_cache(section)
    if method == "mxfp4":
        return Quantization(method, 4.25, experts_only=True)
    if method.startswith("modelopt") or method in ("fp8", "nvfp4"):
        four = "fp4" in f"{method} {section.get('quant_algo', '')}".lower()
        return Quantization("nvfp4" if four else "fp8", 4.5 if four else 8.0, kv_cache_fp8=fp8_cache)
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round"):
        bits = _whole(section, "bits", "w_bit") or 4
        group = _whole(section, "group_size", "q_group_size") or _GROUP
        return Quantization(method, _packed(bits, group, zero_points=True))
    if method == "bitsandbytes":
        return Quantization(method, 4.5 if section.get("load_in_4bit") else 8.0)
    if method == "compressed-tensors":
        return _compressed(section, fp8_cache)
    return Quantization(method, 16.0, known=False)


def _compressed(section: dict[str, Any], fp8_cache: bool) -> Quantization:
    groups = section.get("config_groups")
    packs = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    pack = next((pack for pack in packs if isinstance(pack, dict) and _whole(pack, "num_bits")), None)
    if pack is None:
        return Quantization("compressed-tensors", 16.0, kv_cache_fp8=fp8_cache, known=False)
    bits, group = _whole(pack, "num_bits") or 0, _whole(pack, "group_size")
    return Quantization(f"compressed-tensors, {bits} bits", _packed(bits, group), kv_cache_fp8=fp8_cache)


def _whole(section: dict[str, Any], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := section.get(name), int) and value), None)


def _packed(bits: int, group: int | None, zero_points: bool = False) -> float:
    return bits + (_SCALE_BITS + (bits if zero_points else 0)) / group if group and group > 0 else float(bits)


def _has_fp8_cache(section: dict[str, Any]) -> bool:
    scheme = section.get("kv_cache_scheme")
    in_scheme = isinstance(scheme, dict) and scheme.get("num_bits") == 8
    return in_scheme or str(section.get("kv_cache_quant_algo", "")).upper() == "FP8"
