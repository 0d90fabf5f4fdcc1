"""Which layers look at the whole sequence, and which at a window of it."""

from dataclasses import dataclass

from gateway.plan import fields as of
from gateway.plan.fields import Document, PlanError

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_CHUNKED = "chunked_attention"
_INDEXED = "indexed_attention"  # it reads a part of the sequence, but keeps all of it
# Families whose files may leave the pattern out: every so many layers, one looks at everything.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """So many layers with the same reach; None = the whole sequence."""

    count: int
    window_tokens: int | None = None


def attention_layers(fields: Document, layers: int) -> tuple[AttentionLayers, ...]:
    """Layers by reach, those that see everything first."""
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
    if told := of.listed(fields, "layer_types"):
        kinds = [_FULL if kind == _INDEXED else str(kind) for kind in told[:layers]]
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
