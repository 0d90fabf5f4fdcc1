"""A model as its config.json describes it: layers and their windows, what is stored for each token, and weights."""

from dataclasses import dataclass

from gateway.plan import checkpoint as of
from gateway.plan.checkpoint import Document, PlanError
from gateway.plan.weights import Parameters, Quantization, count_parameters, read_quantization

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_CHUNKED = "chunked_attention"
_INDEXED = "indexed_attention"  # it reads a part of the sequence, but keeps all of it
# Families whose files may omit the pattern: every n-th layer has full attention.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}
_LARGEST_FACTOR = 1024
DEFAULT_LENGTH_TOKENS = 2048  # what vLLM assumes where config.json does not say

# Families that read a whole text at once and return vectors: they have no KV cache.
_ENCODERS = frozenset(
    ("bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "mpnet", "nomic_bert", "modernbert", "gte",
     "new", "deberta", "deberta-v2", "camembert", "jina_bert")
)  # fmt: skip
# These change what is stored for a sequence in ways that only the engine itself can calculate.
_BEYOND = (
    "compress_ratios", "hybrid_override_pattern", "layers_block_type", "mamba_d_state", "mamba_n_heads", "ssm_cfg",
    "state_size", "linear_num_value_heads", "linear_attn_config", "num_kv_shared_layers", "global_head_dim",
    "block_configs", "attn_layer_period", "full_attention_interval", "recurrent_block_type", "lru_width",
    "swa_num_key_value_heads", "swa_head_dim", "attention_other_setting", "hidden_size_per_layer_input", "conv_L_cache",
    "full_attn_idxs",
)  # fmt: skip
_BEYOND_FAMILIES = ("gemma4",)  # different heads in layers with full attention
# Families whose latent vectors vLLM stores; in others it stores whole keys and values.
_LATENT_FAMILIES = ("deepseek", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite", "pangu_ultra_moe", "axk1")


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """A number of layers with the same attention window; None = the whole sequence."""

    count: int
    window_tokens: int | None = None


def attention_layers(fields: Document, layers: int) -> tuple[AttentionLayers, ...]:
    """Layers by window, those with full attention first."""
    window = of.number(fields, ("sliding_window",))
    if fields.get("use_sliding_window") is False:
        window = None
    chunk = of.number(fields, ("attention_chunk_size",))
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
    if types := of.listed(fields, "layer_types"):
        kinds = [_FULL if kind == _INDEXED else str(kind) for kind in types[:layers]]
        return kinds + [_FULL] * (layers - len(kinds))
    if str(fields.get("model_type")).startswith("llama4") and of.number(fields, ("attention_chunk_size",)):
        local = of.listed(fields, "no_rope_layers") or [(index + 1) % 4 for index in range(layers)]
        return [_CHUNKED if each else _FULL for each in local[:layers]]
    if window is None:
        return [_FULL] * layers
    default = _PATTERNS.get(str(fields.get("model_type")))
    if pattern := of.number(fields, ("sliding_window_pattern",)) or default:
        return [_SLIDING if (index + 1) % pattern else _FULL for index in range(layers)]
    return [_SLIDING] * layers


@dataclass(frozen=True, slots=True)
class StoredToken:
    """What one layer stores for one token."""

    heads: int
    values_per_head: int
    latent: bool = False  # one vector for all heads: every GPU holds all of it
    extra_bytes: int = 0  # beside the values, whatever their type
    bytes_in_8_bits: int | None = None  # of all values, where only a part of them is packed; None: a byte each

    def heads_on_gpu(self, tensor_parallel: int) -> int:
        """Heads are split over the GPUs, but each holds at least one: beyond that they are held several times."""
        return 1 if self.latent else max(1, self.heads // tensor_parallel)

    def bytes_on_gpu(self, tensor_parallel: int, value_bytes: float) -> float:
        """Bytes of one token in one layer on one of the GPUs."""
        if value_bytes == 1 and self.bytes_in_8_bits is not None:
            return self.bytes_in_8_bits + self.extra_bytes
        return self.heads_on_gpu(tensor_parallel) * self.values_per_head * value_bytes + self.extra_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What planning needs to know of a model."""

    family: str
    layers: int
    hidden: int
    intermediate: int  # of the widest layer, with all experts that one token goes through
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
        if self.heads % tensor_parallel:
            return False
        if self.stored is None or self.stored.latent:
            return True
        larger, smaller = max(self.stored.heads, tensor_parallel), min(self.stored.heads, tensor_parallel)
        return larger % smaller == 0


def read_shape(document: Document, dtype: str = "auto") -> ModelShape:
    """The shape in a parsed config.json. Raises PlanError."""
    fields = of.text_part(document)
    family = str(fields.get("model_type") or "unknown")
    if fields.get("is_encoder_decoder"):
        raise PlanError(f"{family} is an encoder-decoder model: start vLLM once and plan from its URL")
    beyond = next((name for name in _BEYOND if fields.get(name)), None)
    if beyond or family.startswith(_BEYOND_FAMILIES):
        has = f"config.json has {beyond}: w" if beyond else "w"
        raise PlanError(
            f"{has}hat {family} stores for a sequence cannot be told from config.json alone; "
            "start vLLM once and plan from its URL"
        )
    layers, hidden, heads, vocabulary = of.needed(fields, of.LAYERS, of.HIDDEN, of.HEADS, of.VOCABULARY)
    encoder = _is_encoder(family, fields)
    parameters = count_parameters(fields)
    return ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=parameters.widest,
        heads=heads,
        vocabulary=vocabulary,
        max_length_tokens=_max_length(fields),
        dtype=_dtype(fields, dtype, encoder),
        stored=None if encoder else _stored(fields, hidden, heads),
        attention=() if encoder else attention_layers(fields, layers),
        parameters=parameters,
        quantization=read_quantization(fields.get("quantization_config")),
        has_other_parts=any("vision" in name or "audio" in name for name in document if name.endswith("_config")),
    )


def _is_encoder(family: str, fields: Document) -> bool:
    causal = any("CausalLM" in str(name) for name in of.listed(fields, "architectures"))
    return (family in _ENCODERS and not causal) or fields.get("is_causal") is False


def _stored(fields: Document, hidden: int, heads: int) -> StoredToken:
    family = str(fields.get("model_type"))
    if rank := of.number(fields, ("kv_lora_rank",)):
        if not family.startswith(_LATENT_FAMILIES):
            raise PlanError(f"how vLLM stores {family} is not known here: start vLLM once and plan from its URL")
        rope = of.number(fields, ("qk_rope_head_dim",)) or 0
        index = of.number(fields, ("index_head_dim",)) or 0
        # Sparse attention keeps a key in 8 bits for each layer, with a 4-byte scale for each 128 values. Its kernels
        # need an 8-bit cache in the same form, with positions in 16 bits; those of Blackwell need less.
        packed = rank + rank // 128 * 4 + 2 * rope if index else None
        extra = index + index // 128 * 4
        return StoredToken(1, rank + rope, latent=True, extra_bytes=extra, bytes_in_8_bits=packed)
    size = of.number(fields, of.HEAD_DIM) or hidden // heads
    return StoredToken(
        heads=of.kv_heads(fields, heads), values_per_head=size + (of.number(fields, ("v_head_dim",)) or size)
    )


def _max_length(fields: Document) -> int:
    length = min((value for name in of.LENGTHS if (value := of.number(fields, (name,)))), default=DEFAULT_LENGTH_TOKENS)
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters")
    if not isinstance(scaling, dict) or "gemma3" in str(fields.get("model_type")):
        return length
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    if kind in ("linear", "dynamic") and isinstance(factor, int | float) and 1 <= factor < _LARGEST_FACTOR:
        return int(length * factor)
    return length


def _dtype(fields: Document, wanted: str, encoder: bool) -> str:
    dtype = wanted if wanted != "auto" else str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if wanted == "auto" and dtype == "float32":
        return "float16" if encoder else "bfloat16"  # as vLLM does
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"dtype {dtype!r} is not known: give --dtype bfloat16, float16 or float32")
    return dtype
