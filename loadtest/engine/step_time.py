"""The duration of a step on some GPUs, by its batch. Pure."""

from __future__ import annotations

from dataclasses import KW_ONLY, astuple, dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import orjson

# Of each step: the scheduler, the launch of kernels, sampling. More GPUs do not shorten it.
HOST_SECONDS: Final = 2e-3
# Of a model of 32 layers on several GPUs: 64 exchanges a step, and 16 KiB a token for each, over NVLink.
_EXCHANGES_SECONDS: Final = 0.5e-3
_EXCHANGED_TOKEN_SECONDS: Final = 1.75e-6
_NCCL_GIB: Final = 1.0
_WEIGHTS_GIB: Final = 15.0
_TOKENS_PER_GIB: Final = 8192  # 128 KiB a token


@dataclass(frozen=True, slots=True)
class StepTime:
    """Coefficients of t = a + b*P + e*pairs + c*D + d*K, and m where D > 1, in seconds.

    P is the number of prefilled tokens, pairs the (token, earlier token) pairs that their attention covers, D the
    number of decoding sequences and K the number of KV tokens that they read. m: kernels that multiply by a matrix
    are slower than those for a single vector.
    """

    base_seconds: float
    per_prefill_token_seconds: float
    _: KW_ONLY
    per_attention_pair_seconds: float
    per_decode_sequence_seconds: float
    per_context_token_seconds: float
    matrix_seconds: float = 0.0

    def prefill_seconds(self, tokens: int, already_computed_tokens: int) -> float:
        """The time added to a step by prefilling a chunk of `tokens` after `already_computed_tokens`."""
        pairs = tokens * already_computed_tokens + tokens * (tokens + 1) // 2
        return self.per_prefill_token_seconds * tokens + self.per_attention_pair_seconds * pairs

    def decode_seconds(self, sequences: int, context_tokens: int) -> float:
        """The time added to a step by decoding one token for each of `sequences`."""
        matrix = self.matrix_seconds if sequences > 1 else 0.0
        return matrix + self.per_decode_sequence_seconds * sequences + self.per_context_token_seconds * context_tokens

    def decode_stretch_seconds(self, steps: int, sequences: int, context_tokens: int) -> float:
        """The length of `steps` consecutive decode-only steps; the context grows by `sequences` at each."""
        one = self.base_seconds + self.decode_seconds(sequences, context_tokens)
        return steps * one + self.per_context_token_seconds * sequences * steps * (steps - 1) / 2

    def tensor_parallel(self, gpus: int) -> StepTime:
        """The same model split over several GPUs: each computes its share, and they exchange values in every layer."""
        if gpus == 1:
            return self
        host = min(HOST_SECONDS, self.base_seconds)
        exchanged = _EXCHANGED_TOKEN_SECONDS * 2 * (gpus - 1) / gpus
        return StepTime(
            host + (self.base_seconds - host) / gpus + _EXCHANGES_SECONDS,
            self.per_prefill_token_seconds / gpus + exchanged,
            per_attention_pair_seconds=self.per_attention_pair_seconds / gpus,
            per_decode_sequence_seconds=self.per_decode_sequence_seconds / gpus + exchanged,
            per_context_token_seconds=self.per_context_token_seconds / gpus,
            matrix_seconds=self.matrix_seconds / gpus,
        )


def parsed(prediction: bytes) -> StepTime:
    """Those that `loadtest predict` fitted to a real engine, of its `prediction.json`. Raises ValueError."""
    try:
        found = orjson.loads(prediction)["calibration"]["step_time"]
        step_time = StepTime(**{name: float(found[name]) for name in StepTime.__slots__})
    except (ValueError, KeyError, TypeError):
        raise ValueError("there are no step times in it: give the prediction.json of loadtest predict") from None
    if min(astuple(step_time)) < 0 or step_time.base_seconds <= 0:
        raise ValueError("a step takes no time by it")
    return step_time


class Preset(StrEnum):
    """How fast the simulated engine is, and how large its KV cache."""

    A100_8B = "a100-8b"
    H100_8B = "h100-8b"
    H200_8B = "h200-8b"
    CARD_8B = "card-8b"
    CPU_TINY = "cpu-tiny"


# h100-8b: fitted to a published H100 / Llama-3.1-8B layer profile. a100-8b, h200-8b: the same with weights and KV
# cache read at their bandwidth (2.04 and 4.8 TB/s, of H100's 3.35) and computing at their FLOP/s (312 and 989 of 989).
# card-8b: a card of 32 GB that decodes Llama 3.1 8B at 95, 620 and 2,400 tokens/s for 1, 8 and 32 users.
# cpu-tiny: a 4.5 M parameter Llama on one core.
PRESETS: Final = MappingProxyType(
    {
        "a100-8b": StepTime(
            11.9e-3,
            89e-6,
            per_attention_pair_seconds=4.1e-9,
            per_decode_sequence_seconds=44e-6,
            per_context_token_seconds=77e-9,
        ),
        "h100-8b": StepTime(
            8e-3,
            28e-6,
            per_attention_pair_seconds=1.3e-9,
            per_decode_sequence_seconds=14e-6,
            per_context_token_seconds=47e-9,
        ),
        "h200-8b": StepTime(
            6.2e-3,
            28e-6,
            per_attention_pair_seconds=1.3e-9,
            per_decode_sequence_seconds=14e-6,
            per_context_token_seconds=33e-9,
        ),
        "card-8b": StepTime(
            10.4e-3,
            120e-6,
            per_attention_pair_seconds=6e-9,
            per_decode_sequence_seconds=2e-6,
            per_context_token_seconds=85e-9,
            matrix_seconds=1.7e-3,
        ),
        "cpu-tiny": StepTime(
            3.3e-3,
            60e-6,
            per_attention_pair_seconds=5e-9,
            per_decode_sequence_seconds=150e-6,
            per_context_token_seconds=45e-9,
        ),
    }
)
_KV_CACHE_GIB: Final = MappingProxyType({"a100-8b": 55.9, "h200-8b": 110.7, "card-8b": 12.2})
_KV_TOKENS: Final = 432_000


def kv_tokens(preset: str, gpus: int = 1) -> int:
    """The KV cache of Llama 3.1 8B on this number of GPUs of the preset, in tokens."""
    alone = _KV_CACHE_GIB.get(preset, _KV_TOKENS / _TOKENS_PER_GIB)
    if gpus == 1:
        return round(alone * _TOKENS_PER_GIB)
    each = alone + _WEIGHTS_GIB * (1 - 1 / gpus) - _NCCL_GIB
    return round(gpus * each * _TOKENS_PER_GIB)
