"""The marginal cost, in seconds, of placing one request on one backend.

cost = prefill ahead of it + its own uncached prefill, which also stalls the sequences that decode there
     + engine steps it waits for + what it slows decoding down, its own and theirs
     + time until enough KV cache is free + time until a slot is free
"""

from dataclasses import dataclass
from math import ceil

from gateway.routing.load import Load

_SMOOTHING = 0.5  # share of the fleet's mean batch in each backend's batch
_STALL = 0.1  # weight of the stall imposed on resident sequences
_SLOWDOWN = 0.2  # weight of the decode slowdown, mine and theirs


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of an engine's step time; all but `b` are defaults in proportion to it.

    `b`: seconds per uncached prefill token. `decode_weight`: 0 = TTFT alone, 1 = balanced, 5 = end to end.
    """

    b: float = 28e-6
    decode_weight: float = 1.0
    max_batched_tokens: int = 8192

    @property
    def window_seconds(self) -> float:
        """Most prefill that may be ahead on a backend that is open: about 0.4 of a full token budget."""
        return 0.1 * self.b / 28e-6


@dataclass(frozen=True, slots=True)
class Spot:
    """One backend as a request sees it: what runs there, its size, and what it holds of this prompt."""

    load: Load
    slots: int
    kv_cache_tokens: int | None
    slowness: float
    hit_tokens: int


def prefill_seconds(model: CostModel, spot: Spot, prompt_tokens: int) -> float:
    """Time to prefill the part of the prompt that the backend does not hold."""
    uncached = max(1, prompt_tokens - min(spot.hit_tokens, prompt_tokens - 1))
    e = 4.6e-5 * model.b
    return spot.slowness * (model.b * uncached + e * uncached * (prompt_tokens - uncached / 2))


def placement_seconds(
    model: CostModel, spot: Spot, prompt_tokens: int, output_tokens: float, mean_batch: float, now: float
) -> float:
    """Marginal cost of this request on this backend, in seconds; lower is better."""
    load, slowness = spot.load, spot.slowness
    a, c, d = 286 * model.b, 0.5 * model.b, 1.68e-3 * model.b
    stall, slowdown = _STALL * model.decode_weight, _SLOWDOWN * model.decode_weight
    batch, context, decoding = load.in_flight, load.context_tokens, load.decoding
    uncached = max(1, prompt_tokens - min(spot.hit_tokens, prompt_tokens - 1))
    step = slowness * (a + c * decoding + d * context)
    smoothed = (1 - _SMOOTHING) * batch + _SMOOTHING * mean_batch
    ahead = load.prefill_ahead_seconds(now)
    own = prefill_seconds(model, spot, prompt_tokens)
    cost = ahead + own * (1 + stall * smoothed)
    cost += step * (ceil(uncached / model.max_batched_tokens) + (batch - decoding) + (0.5 if decoding else 0.0))
    cost += slowdown * slowness * output_tokens * (2 * c * batch + d * context + d * batch * prompt_tokens)
    cost += slowdown * (slowness - 1) * output_tokens * a
    if spot.kv_cache_tokens:
        room = spot.kv_cache_tokens - context - batch * output_tokens / 2
        if prompt_tokens > room:
            rate = max(1.0, context) / (output_tokens * step)
            cost += (prompt_tokens - room) / rate
    if batch >= spot.slots:
        cost += (batch + 1 - spot.slots) * output_tokens * step / max(1, decoding)
    return cost
