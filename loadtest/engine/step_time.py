"""The model of time: how long one engine step takes."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class StepTime:
    """Coefficients of t = a + b*P + e*pairs + c*D + d*K, in seconds.

    P is the number of prefilled tokens, pairs the (token, earlier token) pairs that their attention covers, D the
    number of decoding sequences and K the number of KV tokens that they read.
    """

    base_seconds: float
    per_prefill_token_seconds: float
    per_attention_pair_seconds: float
    per_decode_sequence_seconds: float
    per_context_token_seconds: float

    def prefill_seconds(self, tokens: int, already_computed_tokens: int) -> float:
        """What prefilling a chunk of `tokens` after `already_computed_tokens` adds to a step."""
        pairs = tokens * already_computed_tokens + tokens * (tokens + 1) // 2
        return self.per_prefill_token_seconds * tokens + self.per_attention_pair_seconds * pairs

    def decode_seconds(self, sequences: int, context_tokens: int) -> float:
        """What decoding one token for each of `sequences` adds to a step."""
        return self.per_decode_sequence_seconds * sequences + self.per_context_token_seconds * context_tokens

    def decode_stretch_seconds(self, steps: int, sequences: int, context_tokens: int) -> float:
        """The length of `steps` consecutive decode-only steps; the context grows by `sequences` at each."""
        one = self.base_seconds + self.decode_seconds(sequences, context_tokens)
        return steps * one + self.per_context_token_seconds * sequences * steps * (steps - 1) / 2


# h100-8b: fitted to a published H100 / Llama-3.1-8B layer profile. cpu-tiny: a 4.5 M parameter Llama on one core.
PRESETS: Final = MappingProxyType(
    {
        "h100-8b": StepTime(8e-3, 28e-6, 1.3e-9, 14e-6, 47e-9),
        "cpu-tiny": StepTime(3.3e-3, 60e-6, 5e-9, 150e-6, 45e-9),
    }
)
