"""Counts a model's weights from its config.json, with their quantization, and their size in bytes."""

from dataclasses import dataclass
from typing import Any

from gateway.plan import checkpoint as of
from gateway.plan.checkpoint import Document, PlanError

_SCALE_BITS = 16
_GROUP = 128

# Families with two matrices in a feed-forward layer; the others have three, one of which is a gate.
_WITHOUT_A_GATE = frozenset(
    ("gpt2", "opt", "falcon", "gpt_neox", "gptj", "gpt_neo", "bloom", "mpt", "phi", "starcoder2", "gpt_bigcode",
     "nemotron", "apertus", "arcee", "jais2", "nanochat", "persimmon", "codegen", "biogpt", "bert", "roberta",
     "xlm-roberta", "distilbert", "albert", "electra", "mpnet", "camembert")
)  # fmt: skip
_FIRST_SPARSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")


@dataclass(frozen=True, slots=True)
class Quantization:
    """Bits of one weight of a linear layer, scales included; embeddings and the output layer stay as they are."""

    name: str
    bits: float
    experts_only: bool = False
    kv_cache_fp8: bool = False
    known: bool = True  # False: nothing is known of this method, weights are counted as if unpacked


def chosen(name: str, found: Quantization | None) -> Quantization | None:
    """The quantization of the command line; auto = that of the checkpoint."""
    keeps_fp8_cache = found is not None and found.kv_cache_fp8
    bits = {"fp8": 8.0, "int8": 8.0, "int4": 4 + (_SCALE_BITS + 4) / _GROUP}
    if name == "auto":
        return found
    return Quantization(name, bits[name], kv_cache_fp8=keeps_fp8_cache) if name in bits else None


def read_quantization(section: Any) -> Quantization | None:
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


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights by their use, since each is packed in its own way."""

    embeddings: int  # and the output layer: never packed
    linear: int
    experts: int = 0
    widest: int = 0  # values of the widest feed-forward layer that one token goes through

    @property
    def total(self) -> int:
        return self.embeddings + self.linear + self.experts

    def bytes(self, dtype_bytes: int, quantization: Quantization | None) -> int:
        plain = float(dtype_bytes)
        packed = quantization.bits / 8 if quantization is not None and quantization.known else plain
        linear = plain if quantization is not None and quantization.experts_only else packed
        return int(self.embeddings * plain + self.linear * linear + self.experts * packed)


def count_parameters(fields: Document) -> Parameters:
    """Count them. Raises PlanError that says what is missing."""
    layers, hidden, heads, vocabulary = of.needed(fields, of.LAYERS, of.HIDDEN, of.HEADS, of.VOCABULARY)
    family = str(fields.get("model_type"))
    norms = (4 if family in _FOUR_NORMS else 2) * hidden * layers + hidden
    tables = 1 if fields.get("tie_word_embeddings") or _has_no_output_layer(fields) else 2
    positions = (of.number(fields, ("max_position_embeddings", "n_positions")) or 0) * hidden
    embeddings = tables * vocabulary * hidden + (positions if family in _WITHOUT_A_GATE else 0)
    matrices = 2 if family in _WITHOUT_A_GATE else 3
    attention = layers * _attention(fields, hidden, heads)
    experts = of.number(fields, of.EXPERTS)
    if experts is None and (named := _unknown_experts(fields)):
        raise PlanError(f"{named} of config.json is not known here: give --set num_experts=N")
    if experts is None or experts < 2:
        inner = of.number(fields, of.INTERMEDIATE) or 4 * hidden
        return Parameters(embeddings, attention + norms + layers * matrices * hidden * inner, widest=inner)
    return _with_experts(fields, experts, Parameters(embeddings, attention + norms), layers, hidden)


def _attention(fields: Document, hidden: int, heads: int) -> int:
    if rank := of.number(fields, ("kv_lora_rank",)):
        rope, plain, value = of.needed(fields, ("qk_rope_head_dim",), ("qk_nope_head_dim",), ("v_head_dim",))
        query_rank = of.number(fields, ("q_lora_rank",))
        queries = heads * (rope + plain)
        query = (hidden * query_rank + query_rank * queries) if query_rank else hidden * queries
        return query + hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
    size = of.number(fields, of.HEAD_DIM) or hidden // heads
    kv_heads = of.kv_heads(fields, heads)
    biases = (heads + 2 * kv_heads) * size if fields.get("attention_bias") or fields.get("model_type") == "qwen2" else 0
    return hidden * size * (2 * heads + 2 * kv_heads) + biases


def _with_experts(fields: Document, experts: int, rest: Parameters, layers: int, hidden: int) -> Parameters:
    dense_inner = of.number(fields, ("intermediate_size_mlp", *of.INTERMEDIATE)) or 4 * hidden
    inner = of.number(fields, ("moe_intermediate_size", *of.INTERMEDIATE)) or 4 * hidden
    sparse = sum(_is_sparse(fields, index) for index in range(layers))
    shared = _shared(fields, inner)
    routed = sparse * experts * 3 * hidden * inner
    around = sparse * (3 * hidden * shared + hidden * experts) + (layers - sparse) * 3 * hidden * dense_inner
    used = of.number(fields, ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")) or 1
    widest = max(used * inner + shared, dense_inner if sparse < layers else 0)
    return Parameters(rest.embeddings, rest.linear + around, routed, widest)


def _unknown_experts(fields: Document) -> str | None:
    """A field that seems to give the number of experts under an unknown name."""
    beside = ("per_tok", "shared", "group", "used", "top")
    names = (name for name in fields if "experts" in name and not any(word in name for word in beside))
    return next((name for name in names if (of.number(fields, (name,)) or 0) > 1), None)


def _shared(fields: Document, inner: int) -> int:
    if size := of.number(fields, ("shared_expert_intermediate_size", "shared_intermediate_size")):
        return size
    if str(fields.get("model_type", "")).startswith("llama4"):
        return inner
    return (of.number(fields, ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")) or 0) * inner


def _is_sparse(fields: Document, index: int) -> bool:
    if index < (of.number(fields, _FIRST_SPARSE) or 0) or index in of.listed(fields, "mlp_only_layers"):
        return False
    kinds = of.listed(fields, "mlp_layer_types")
    if index < len(kinds):
        return bool(kinds[index] != "dense")
    every = fields.get("moe_layer_freq")
    if isinstance(every, list):
        return bool(every[index]) if index < len(every) else True
    if isinstance(every, int) and every > 1:
        return index % every == 0
    step = of.number(fields, ("decoder_sparse_step", "interleave_moe_layer_step")) or 1
    return (index + 1) % step == 0


def _has_no_output_layer(fields: Document) -> bool:
    """Whether it returns vectors instead of text."""
    names = [str(name) for name in of.listed(fields, "architectures")]
    return bool(names) and all(name.endswith(("Model", "ForSequenceClassification")) for name in names)
