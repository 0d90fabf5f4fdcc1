"""The marginal cost, in seconds, of placing one request on one backend.

cost = prefill ahead of it + its own uncached prefill, which also stalls the sequences that decode there
     + engine steps it waits for + what it slows decoding down, its own and theirs
     + time until enough KV cache is free + time until a slot is free
"""

from dataclasses import dataclass, field

from gateway.routing.load import Load

_SMOOTHING = 0.5  # share of the fleet's mean batch in each backend's batch
_STALL = 0.1  # weight of the stall imposed on resident sequences
_SLOWDOWN = 0.2  # weight of the decode slowdown, mine and theirs


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of an engine's step time, in seconds; all but `b` are in proportion to it.

    A step takes a + b x prefill tokens + e x their context + c x decoding sequences + d x context tokens.
    `decode_weight`: 0 = TTFT alone, 1 = balanced, 5 = end to end.
    """

    b: float = 28e-6
    decode_weight: float = 1.0
    max_batched_tokens: int = 8192
    a: float = field(init=False)
    c: float = field(init=False)
    d: float = field(init=False)
    e: float = field(init=False)

    def __post_init__(self) -> None:
        for name, ratio in (("a", 286), ("c", 0.5), ("d", 1.68e-3), ("e", 4.6e-5)):
            object.__setattr__(self, name, ratio * self.b)


def prefill_seconds(model: CostModel, slowness: float, prompt_tokens: int, hit_tokens: int) -> float:
    """Time to prefill the part of the prompt that the backend does not hold; at least one token is computed."""
    uncached = prompt_tokens - min(hit_tokens, prompt_tokens - 1)
    return slowness * uncached * (model.b + model.e * (prompt_tokens - uncached / 2))


def step_seconds(model: CostModel, slowness: float, load: Load) -> float:
    """Time of an engine step without prefill."""
    return slowness * (model.a + model.c * load.decoding + model.d * load.context_tokens)


def placement_seconds(
    model: CostModel,
    load: Load,
    slots: int,
    kv_cache_tokens: int | None,
    slowness: float,
    prompt_tokens: int,
    hit_tokens: int,
    own_seconds: float,
    output_tokens: float,
    mean_batch: float,
    now: float,
) -> float:
    """Marginal cost of this request on this backend, in seconds; lower is better.

    `own_seconds` is its `prefill_seconds` there, `mean_batch` the mean of sequences in flight over the fleet.
    """
    c, d = model.c, model.d
    batch, context, decoding = load.in_flight, load.context_tokens, load.decoding
    uncached = prompt_tokens - min(hit_tokens, prompt_tokens - 1)
    step = step_seconds(model, slowness, load)
    smoothed = (1 - _SMOOTHING) * batch + _SMOOTHING * mean_batch
    slowdown = _SLOWDOWN * model.decode_weight * slowness * output_tokens
    chunks = -(-uncached // model.max_batched_tokens)
    cost = (
        load.prefill_ahead_seconds(now)
        + own_seconds * (1 + _STALL * model.decode_weight * smoothed)
        + step * (chunks + (batch - decoding) + (0.5 if decoding else 0.0))
        + slowdown * (2 * c * batch + d * context + d * batch * prompt_tokens)
        + slowdown * (1 - 1 / slowness) * model.a
    )
    if kv_cache_tokens is not None:
        room = kv_cache_tokens - context - batch * output_tokens / 2
        if prompt_tokens > room:
            cost += (prompt_tokens - room) * output_tokens * step / max(1, context)
    if batch >= slots:
        cost += (batch + 1 - slots) * output_tokens * step / max(1, decoding)
    return cost
