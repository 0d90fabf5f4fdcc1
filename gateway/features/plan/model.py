"""A model by its folder: its config.json, whose field names differ by family, and the size of its weights."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEAD_DIM = ("head_dim", "kv_channels", "hidden_size_per_head")
INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
VOCABULARY = ("vocab_size", "padded_vocab_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LENGTHS = "max_position_embeddings n_positions max_seq_len seq_length model_max_length max_sequence_length"
# Sections with the text part of a multimodal model.
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
# Defaults of the library that published files of these families omit.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    }
}
_TIED = frozenset(("gemma", "gemma2", "gemma3", "cohere", "cohere2", "gpt2", "opt", "bloom", "falcon", "mpt", "bert"))
_MOST_HEADER_BYTES = 100 << 20
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class PlanError(Exception):
    """No plan can be made; the message gives the reason and the option to set, in one line."""


def text_part(document: Document) -> dict[str, Any]:
    """The text section, completed by the outer fields."""
    inner = next((document[name] for name in _TEXT_PARTS if isinstance(document.get(name), dict)), None)
    if inner is None:
        return _with_defaults(dict(document))
    if any(isinstance(inner.get(name), dict) for name in _TEXT_PARTS):
        inner = text_part(inner)
    inner = {"quantization_config": document.get("quantization_config"), **inner}
    outer = {name: value for name, value in document.items() if not isinstance(value, dict)}
    # The library's defaults depend on the inner family; tying in the outer file applies to the whole model.
    return _with_defaults(outer | inner)


def _with_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    family = str(fields.get("model_type", ""))
    tied = {"tie_word_embeddings": family.removesuffix("_text") in _TIED}
    return {**tied, **_DEFAULTS.get(family, {}), **{key: value for key, value in fields.items() if value is not None}}


def number(fields: Document, *names: str) -> int | None:
    """The first of these fields that holds a whole number above 0."""
    values = (fields.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _kv_heads(fields: Document, heads: int) -> int:
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    return number(fields, *KV_HEADS) or heads


def listed(fields: Document, name: str) -> list[Any]:
    value = fields.get(name)
    return value if isinstance(value, list) else []


def needed(fields: Document, *wanted: tuple[str, ...]) -> tuple[int, ...]:
    """The values of all these fields. Raises PlanError with the names of the missing ones."""
    found = [number(fields, *names) for names in wanted]
    if missing := [names[0] for names, value in zip(wanted, found, strict=True) if value is None]:
        options = " ".join(f"--set {name}=N" for name in missing)
        raise PlanError(f"the model's config.json lacks {', '.join(missing)}: give {options}")
    return tuple(value for value in found if value is not None)


def read_checkpoint(path: Path) -> tuple[str, dict[str, Any]]:
    """Name and config.json of a model, by its folder or its config.json. Raises PlanError."""
    config = _document(path / "config.json" if path.is_dir() else path)
    return str(path.resolve()) if path.is_dir() else str(config.get("_name_or_path") or "MODEL"), config


def weigh(path: Path, config: Document, value_bytes: int) -> tuple[int | None, str]:
    """Bytes of the weights, floats as `value_bytes` each; None if there are none; and the source. Raises PlanError."""
    text, folder = text_part(config), path if path.is_dir() else path.parent
    # Layers behind the last are for speculation, which is off unless asked for.
    layers = number(text, *LAYERS) if text.get("num_nextn_predict_layers") else None
    if files := _weight_files(folder):
        return _size(files, value_bytes, layers), "the headers of its safetensors files"
    total = number(_section(folder / _INDEX, "metadata"), "total_size")
    if total is not None:
        of_32_bits = "float32" in str(text.get("torch_dtype") or text.get("dtype"))
        return total * value_bytes // 4 if of_32_bits else total, f"total_size of {_INDEX}"
    return None, "counted from config.json"


def _document(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"{file} is not there: give a model's folder, its config.json, or a backend's URL") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise PlanError(f"{file} is not a model's config.json")
    return found


def _section(file: Path, name: str) -> dict[str, Any]:
    found = _document(file).get(name) if file.is_file() else None
    return found if isinstance(found, dict) else {}


def _weight_files(folder: Path) -> list[Path]:
    """The files listed in the index, if there is one: a folder may hold the same weights in another form too."""
    index = folder / _INDEX
    if index.is_file():
        names = {str(name) for name in _section(index, "weight_map").values()}
        files = [folder / name for name in sorted(names)]
        return files if files and all(file.is_file() for file in files) else []
    return [file for file in [folder / "model.safetensors"] if file.is_file()] or sorted(folder.glob("*.safetensors"))


def _size(files: list[Path], value_bytes: int, layers: int | None) -> int:
    total = 0
    for file in files:
        for name, dtype, size in _tensors(file):
            found = _LAYER.search(name)
            if found and layers is not None and int(found[1]) >= layers:
                continue
            stored = _FLOATS.get(dtype)
            total += size * value_bytes // stored if stored and stored > 2 else size
    return total


def _tensors(file: Path) -> Iterator[tuple[str, str, int]]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _MOST_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield name, str(entry["dtype"]), end - start
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{file} is not a safetensors file: {error}") from None


_SCALE_BITS = 16
_GROUP = 128
# Families with two matrices in a feed-forward layer; others have three, with a gate among them.
_WITHOUT_A_GATE = (
    "gpt2 opt falcon gpt_neox gptj gpt_neo bloom mpt phi starcoder2 gpt_bigcode nemotron apertus arcee jais2 nanochat"
    " persimmon codegen biogpt bert roberta xlm-roberta distilbert albert electra mpnet camembert"
)
_FIRST_SPARSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_CHUNKED = "chunked_attention"
_INDEXED = "indexed_attention"  # it reads a part of the sequence, but keeps all of it
# Families whose files may omit the pattern: every n-th layer has full attention.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}
_LARGEST_FACTOR = 1024
DEFAULT_LENGTH_TOKENS = 2048  # vLLM's assumption where config.json has no length

# Families that read a whole text at once and return vectors: they have no KV cache.
_ENCODERS = (
    "bert roberta xlm-roberta distilbert albert electra mpnet nomic_bert modernbert gte new deberta deberta-v2"
    " camembert jina_bert"
)
# These change the storage of a sequence in ways that only the engine itself can calculate.
_BEYOND = (
    "compress_ratios hybrid_override_pattern layers_block_type mamba_d_state mamba_n_heads ssm_cfg state_size"
    " linear_num_value_heads linear_attn_config num_kv_shared_layers global_head_dim block_configs attn_layer_period"
    " full_attention_interval recurrent_block_type lru_width swa_num_key_value_heads swa_head_dim"
    " attention_other_setting hidden_size_per_layer_input conv_L_cache full_attn_idxs"
)
_BEYOND_FAMILIES = ("gemma4",)  # different heads in layers with full attention
# Families whose latent vectors vLLM stores; in others it stores whole keys and values.
_LATENT_FAMILIES = ("deepseek", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite", "pangu_ultra_moe", "axk1")


@dataclass(frozen=True, slots=True)
class Quantization:
    """Bits of one weight of a linear layer, scales included; embeddings and the output layer stay as they are."""

    name: str
    bits: float | None  # None: an unknown method, whose weights are counted as if unpacked
    experts_only: bool = False
    _: KW_ONLY
    kv_cache_fp8: bool = False


def chosen(name: str, found: Quantization | None) -> Quantization | None:
    """The quantization of the command line; auto = that of the checkpoint."""
    if name == "auto":
        return found
    bits = {"fp8": 8.0, "int8": 8.0, "int4": 4 + (_SCALE_BITS + 4) / _GROUP}
    keeps_fp8_cache = found is not None and found.kv_cache_fp8
    return Quantization(name, bits[name], kv_cache_fp8=keeps_fp8_cache) if name in bits else None


def read_quantization(section: Any) -> Quantization | None:
    if not isinstance(section, dict):
        return None
    method = str(section.get("quant_method") or section.get("quant_algo") or "unknown").lower()
    scheme = section.get("kv_cache_scheme")
    fp8_cache = isinstance(scheme, dict) and scheme.get("num_bits") == 8
    fp8_cache = fp8_cache or str(section.get("kv_cache_quant_algo", "")).upper() == "FP8"
    name, bits = _bits(method, section)
    return Quantization(name, bits, method == "mxfp4", kv_cache_fp8=fp8_cache)


def _bits(method: str, section: dict[str, Any]) -> tuple[str, float | None]:
    """The method's name, and the bits of a weight with its scales; None = nothing is known of the method."""
    if method == "mxfp4":
        return method, 4.25
    if method.startswith("modelopt") or method in ("fp8", "nvfp4"):
        four = "fp4" in f"{method} {section.get('quant_algo', '')}".lower()
        return ("nvfp4", 4.5) if four else ("fp8", 8.0)
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round"):
        bits = _whole(section, "bits", "w_bit") or 4
        return method, _packed(bits, _whole(section, "group_size", "q_group_size") or _GROUP, zero_points=True)
    if method == "bitsandbytes":
        return method, 4.5 if section.get("load_in_4bit") else 8.0
    groups = section.get("config_groups") if method == "compressed-tensors" else None
    packs = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    for pack in packs:
        if isinstance(pack, dict) and (size := _whole(pack, "num_bits")):
            return f"{method}, {size} bits", _packed(size, _whole(pack, "group_size"))
    return method, None


def _whole(section: dict[str, Any], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := section.get(name), int) and value), None)


def _packed(bits: int, group: int | None, zero_points: bool = False) -> float:
    return bits + (_SCALE_BITS + (bits if zero_points else 0)) / group if group and group > 0 else float(bits)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights by their use, since each is packed in its own way."""

    embeddings: int  # and the output layer: never packed
    linear: int
    experts: int
    _: KW_ONLY
    widest: int  # values of the widest feed-forward layer that one token goes through
    used_share: float = 1.0  # of the experts, by one token

    @property
    def total(self) -> int:
        return self.embeddings + self.linear + self.experts

    def bytes(self, dtype_bytes: int, quantization: Quantization | None) -> int:
        plain = float(dtype_bytes)
        packed = quantization.bits / 8 if quantization is not None and quantization.bits is not None else plain
        linear = plain if quantization is not None and quantization.experts_only else packed
        return int(self.embeddings * plain + self.linear * linear + self.experts * packed)


def count_parameters(fields: Document) -> Parameters:
    """Counts the parameters. Raises PlanError with the missing field."""
    layers, hidden, heads, vocabulary = needed(fields, LAYERS, HIDDEN, HEADS, VOCABULARY)
    family = str(fields.get("model_type"))
    norms = (4 if family in _FOUR_NORMS else 2) * hidden * layers + hidden
    classes = [str(name) for name in listed(fields, "architectures")]
    has_no_output = bool(classes) and all(name.endswith(("Model", "ForSequenceClassification")) for name in classes)
    tables = 1 if fields.get("tie_word_embeddings") or has_no_output else 2
    positions = (number(fields, "max_position_embeddings", "n_positions") or 0) * hidden
    has_no_gate = family in _WITHOUT_A_GATE.split()
    embeddings = tables * vocabulary * hidden + (positions if has_no_gate else 0)
    experts = number(fields, *EXPERTS) or _no_experts(fields)
    sparse = sum(_is_sparse(fields, index) for index in range(layers)) if experts > 1 else 0
    matrices = 2 if has_no_gate and not sparse else 3
    dense_inner = number(fields, "intermediate_size_mlp", *INTERMEDIATE) or 4 * hidden
    inner = number(fields, "moe_intermediate_size", *INTERMEDIATE) or 4 * hidden
    used = number(fields, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k") or 1
    shared = _shared(fields, inner)
    linear = norms + layers * _attention(fields, hidden, heads)
    linear += sparse * (3 * hidden * shared + hidden * experts) + (layers - sparse) * matrices * hidden * dense_inner
    widest = max(used * inner + shared if sparse else 0, dense_inner if sparse < layers else 0)
    share = min(1.0, used / experts) if sparse else 1.0
    return Parameters(embeddings, linear, sparse * experts * 3 * hidden * inner, widest=widest, used_share=share)


def _attention(fields: Document, hidden: int, heads: int) -> int:
    if rank := number(fields, "kv_lora_rank"):
        rope, plain, value = needed(fields, ("qk_rope_head_dim",), ("qk_nope_head_dim",), ("v_head_dim",))
        query_rank = number(fields, "q_lora_rank")
        queries = heads * (rope + plain)
        query = (hidden * query_rank + query_rank * queries) if query_rank else hidden * queries
        return query + hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
    size = number(fields, *HEAD_DIM) or hidden // heads
    kv_heads = _kv_heads(fields, heads)
    biases = (heads + 2 * kv_heads) * size if fields.get("attention_bias") or fields.get("model_type") == "qwen2" else 0
    return hidden * size * (2 * heads + 2 * kv_heads) + biases


def _no_experts(fields: Document) -> int:
    """0. Raises PlanError if a field seems to give the number of experts under an unknown name."""
    for name in fields:
        beside = any(word in name for word in ("per_tok", "shared", "group", "used", "top"))
        if "experts" in name and not beside and (number(fields, name) or 0) > 1:
            raise PlanError(f"{name} of config.json is not known here: give --set num_experts=N")
    return 0


def _shared(fields: Document, inner: int) -> int:
    if size := number(fields, "shared_expert_intermediate_size", "shared_intermediate_size"):
        return size
    if str(fields.get("model_type", "")).startswith("llama4"):
        return inner
    return (number(fields, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0) * inner


def _is_sparse(fields: Document, index: int) -> bool:
    if index < (number(fields, *_FIRST_SPARSE) or 0) or index in listed(fields, "mlp_only_layers"):
        return False
    kinds, every = listed(fields, "mlp_layer_types"), fields.get("moe_layer_freq")
    if index < len(kinds):
        return bool(kinds[index] != "dense")
    if isinstance(every, list):
        return index >= len(every) or bool(every[index])
    if isinstance(every, int) and every > 1:
        return index % every == 0
    step = number(fields, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    return (index + 1) % step == 0


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """A number of layers with the same attention window; None = the whole sequence."""

    count: int
    window_tokens: int | None = None


def attention_layers(fields: Document, layers: int) -> tuple[AttentionLayers, ...]:
    """Layers by window; layers with full attention come first."""
    window = None if fields.get("use_sliding_window") is False else number(fields, "sliding_window")
    chunk = number(fields, "attention_chunk_size")
    kinds = _kinds(fields, layers, window)
    if strange := sorted(set(kinds) - {_FULL, _SLIDING, _CHUNKED}):
        raise PlanError(
            f"config.json has layers of type {strange[0]}, which store something else than keys and values: "
            "start vLLM once and plan from its URL"
        )
    if _SLIDING in kinds and window is None:
        raise PlanError("config.json has sliding_attention layers but no sliding_window: give --set sliding_window=N")
    if _CHUNKED in kinds and chunk is None:
        raise PlanError("config.json has chunked_attention layers but no chunk: give --set attention_chunk_size=N")
    reaches = ((_FULL, None), (_SLIDING, window), (_CHUNKED, chunk))  # of a chunk, no more than all of it is kept
    return tuple(AttentionLayers(kinds.count(kind), reach) for kind, reach in reaches if kind in kinds)


def _kinds(fields: Document, layers: int, window: int | None) -> list[str]:
    if types := listed(fields, "layer_types"):
        kinds = [_FULL if kind == _INDEXED else str(kind) for kind in types[:layers]]
        return kinds + [_FULL] * (layers - len(kinds))
    if str(fields.get("model_type")).startswith("llama4") and number(fields, "attention_chunk_size"):
        local = listed(fields, "no_rope_layers") or [(index + 1) % 4 for index in range(layers)]
        return [_CHUNKED if each else _FULL for each in local[:layers]]
    if window is None:
        return [_FULL] * layers
    default = _PATTERNS.get(str(fields.get("model_type")))
    if pattern := number(fields, "sliding_window_pattern") or default:
        return [_SLIDING if (index + 1) % pattern else _FULL for index in range(layers)]
    return [_SLIDING] * layers


@dataclass(frozen=True, slots=True)
class StoredToken:
    """The contents of the KV cache for one token in one layer."""

    heads: int
    values_per_head: int
    _: KW_ONLY
    latent: bool = False  # one vector for all heads: every GPU holds all of it
    extra_bytes: int = 0  # in addition to the values, whatever their type
    bytes_in_8_bits: int | None = None  # of all values, where only a part of them is packed; None: a byte each

    def bytes_on_gpu(self, tensor_parallel: int, value_bytes: float) -> float:
        """Heads are split over the GPUs, at least one each: with more GPUs than heads, heads are duplicated."""
        if value_bytes == 1 and self.bytes_in_8_bits is not None:
            return self.bytes_in_8_bits + self.extra_bytes
        heads = 1 if self.latent else max(1, self.heads // tensor_parallel)
        return heads * self.values_per_head * value_bytes + self.extra_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that planning needs."""

    family: str
    _: KW_ONLY
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    max_length_tokens: int
    dtype: str
    stored: StoredToken | None  # None: an encoder, which stores nothing
    attention: tuple[AttentionLayers, ...]
    parameters: Parameters
    quantization: Quantization | None
    has_other_parts: bool = False  # vision or audio, whose weights are not counted from config.json

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def splits(self, tensor_parallel: int) -> bool:
        kv_heads = tensor_parallel if self.stored is None or self.stored.latent else self.stored.heads
        return self.heads % tensor_parallel == 0 == max(kv_heads, tensor_parallel) % min(kv_heads, tensor_parallel)


def read_shape(document: Document, dtype: str = "auto") -> ModelShape:
    """The shape in a parsed config.json. Raises PlanError."""
    fields = text_part(document)
    family = str(fields.get("model_type") or "unknown")
    if fields.get("is_encoder_decoder"):
        raise PlanError(f"{family} is an encoder-decoder model: start vLLM once and plan from its URL")
    beyond = next((name for name in _BEYOND.split() if fields.get(name)), None)
    if beyond or family.startswith(_BEYOND_FAMILIES):
        has = f"config.json has {beyond}: w" if beyond else "w"
        raise PlanError(
            f"{has}hat {family} stores for a sequence cannot be told from config.json alone; "
            "start vLLM once and plan from its URL"
        )
    layers, hidden, heads, vocabulary = needed(fields, LAYERS, HIDDEN, HEADS, VOCABULARY)
    causal = any("CausalLM" in str(name) for name in listed(fields, "architectures"))
    encoder = (family in _ENCODERS.split() and not causal) or fields.get("is_causal") is False
    return ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        max_length_tokens=_max_length(fields),
        dtype=_dtype(fields, dtype, encoder),
        stored=None if encoder else _stored(fields, hidden, heads),
        attention=() if encoder else attention_layers(fields, layers),
        parameters=count_parameters(fields),
        quantization=read_quantization(fields.get("quantization_config")),
        has_other_parts=any("vision" in name or "audio" in name for name in document if name.endswith("_config")),
    )


def _stored(fields: Document, hidden: int, heads: int) -> StoredToken:
    family = str(fields.get("model_type"))
    if rank := number(fields, "kv_lora_rank"):
        if not family.startswith(_LATENT_FAMILIES):
            raise PlanError(f"how vLLM stores {family} is not known here: start vLLM once and plan from its URL")
        rope = number(fields, "qk_rope_head_dim") or 0
        index = number(fields, "index_head_dim") or 0
        # Sparse attention keeps a key in 8 bits for each layer, with a 4-byte scale for each 128 values. Its kernels
        # need an 8-bit cache in the same form, with positions in 16 bits; on Blackwell they need less.
        packed = rank + rank // 128 * 4 + 2 * rope if index else None
        extra = index + index // 128 * 4
        return StoredToken(1, rank + rope, latent=True, extra_bytes=extra, bytes_in_8_bits=packed)
    size = number(fields, *HEAD_DIM) or hidden // heads
    return StoredToken(_kv_heads(fields, heads), size + (number(fields, "v_head_dim") or size))


def _max_length(fields: Document) -> int:
    length = min((value for name in _LENGTHS.split() if (value := number(fields, name))), default=DEFAULT_LENGTH_TOKENS)
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters")
    if isinstance(scaling, dict) and "gemma3" not in str(fields.get("model_type")):
        kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
        if kind in ("linear", "dynamic") and isinstance(factor, int | float) and 1 <= factor < _LARGEST_FACTOR:
            return int(length * factor)
    return length


def _dtype(fields: Document, wanted: str, encoder: bool) -> str:
    given = (fields.get("dtype") or fields.get("torch_dtype") or "float32") if wanted == "auto" else wanted
    dtype = str(given).removeprefix("torch.")
    if wanted == "auto" and dtype == "float32":
        return "float16" if encoder else "bfloat16"  # as vLLM does
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"dtype {dtype!r} is not known: give --dtype bfloat16, float16 or float32")
    return dtype
