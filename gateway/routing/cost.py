"""The marginal cost, in seconds, of placing one request on one backend.

cost = prefill ahead of it + its own uncached prefill, which also stalls the sequences that decode there
     + as much again for the cache that it takes there, from which something goes that would have been hit
     + engine steps it waits for + what it slows decoding down, its own and theirs
     + time until enough KV cache is free + time until a slot is free
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.routing.engine_load import EngineLoad

_SMOOTHING = 0.5  # share of the fleet's mean batch in each backend's batch
_CACHE = 1.0  # weight of the cache that the own prefill takes
_STALL = 0.15  # weight of the stall imposed on resident sequences
_BOUNDLESS_TOKENS = 1e15  # room where the size of the KV cache is not known
_SLOWDOWN = 0.1  # weight of the decode slowdown, mine and theirs


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


class Terms(NamedTuple):
    """What a backend contributes to the cost of every request, until its load changes. Seconds, unless said otherwise.

    With `output` tokens expected and `prompt` tokens in all, a request costs there
    ahead + own x (stall + mean_stall) + step x chunks + waits
    + output x (slowdown + slowdown_by_prompt x prompt + slot) + output x room_rate x tokens that do not fit.
    """

    slowness: float
    step: float  # an engine step without prefill
    waits: float  # for prefills to begin, and the step under way
    stall: float  # factor of the own prefill, but for `mean_stall`
    slowdown: float
    slowdown_by_prompt: float
    slot: float
    room_tokens: float  # free in the KV cache, but for what running sequences will still take of it
    room_by_output: float
    room_rate: float


def terms_of(model: CostModel, load: EngineLoad, slots: int, kv_cache_tokens: int | None, slowness: float) -> Terms:
    """The terms of a backend with this load."""
    batch, context, decoding, weight = load.in_flight, load.context_tokens, load.decoding, model.decode_weight
    step = step_seconds(model, slowness, load)
    slowdown = _SLOWDOWN * weight * slowness
    made = (  # no call of Terms itself, which costs as much as the rest: this is made anew whenever a load changes
        slowness,
        step,
        step * (batch - decoding + (0.5 if decoding else 0.0)),
        1 + _CACHE + _STALL * weight * (1 - _SMOOTHING) * batch,
        slowdown * (2 * model.c * batch + model.d * context + (1 - 1 / slowness) * model.a),
        slowdown * model.d * batch,
        (batch + 1 - slots) * step / max(1, decoding) if batch >= slots else 0.0,
        _BOUNDLESS_TOKENS if kv_cache_tokens is None else kv_cache_tokens - context,
        batch / 2,
        step / max(1, context),
    )
    return tuple.__new__(Terms, made)


def mean_stall_of(model: CostModel, in_flight: float, backends: int) -> float:
    """What the sequences that so many backends run in the mean add to the factor of every own prefill."""
    return _STALL * model.decode_weight * _SMOOTHING * in_flight / max(1, backends)


def prefill_seconds(model: CostModel, slowness: float, prompt_tokens: int, hit_tokens: int) -> float:
    """Time to prefill the part of the prompt that the backend does not hold; at least one token is computed."""
    uncached = prompt_tokens - min(hit_tokens, prompt_tokens - 1)
    return slowness * uncached * (model.b + model.e * (prompt_tokens - uncached / 2))


def step_seconds(model: CostModel, slowness: float, load: EngineLoad) -> float:
    """Time of an engine step without prefill."""
    return slowness * (model.a + model.c * load.decoding + model.d * load.context_tokens)


class Parts(NamedTuple):
    """A cost, taken apart; seconds."""

    ahead: float
    prefill: float
    cache: float
    stall: float
    steps: float
    slowdown: float
    slot: float
    memory: float


def cost_parts(
    terms: Terms,
    prompt_tokens: int,
    own_seconds: float,
    chunks: int,
    output_tokens: float,
    mean_stall: float,
    ahead_seconds: float,
) -> Parts:
    """The same as `placement_seconds`, term by term."""
    lacking = prompt_tokens - terms.room_tokens + output_tokens * terms.room_by_output
    return Parts(
        ahead=ahead_seconds,
        prefill=own_seconds,
        cache=own_seconds * _CACHE,
        stall=own_seconds * (terms.stall - 1 - _CACHE + mean_stall),
        steps=terms.step * chunks + terms.waits,
        slowdown=output_tokens * (terms.slowdown + terms.slowdown_by_prompt * prompt_tokens),
        slot=output_tokens * terms.slot,
        memory=output_tokens * terms.room_rate * max(0.0, lacking),
    )


def placement_seconds(
    terms: Terms,
    prompt_tokens: int,
    own_seconds: float,
    chunks: int,
    output_tokens: float,
    mean_stall: float,
    ahead_seconds: float,
) -> float:
    """Marginal cost of this request on this backend, in seconds; lower is better.

    `own_seconds` is its `prefill_seconds` there, in `chunks` engine steps; `mean_stall` that of the fleet;
    `ahead_seconds` the prefill that was sent there before.
    """
    (_, step, waits, stall, slowdown, by_prompt, slot, room, room_by_output, room_rate) = terms
    cost = (
        ahead_seconds
        + own_seconds * (stall + mean_stall)
        + step * chunks
        + waits
        + output_tokens * (slowdown + by_prompt * prompt_tokens + slot)
    )
    lacking = prompt_tokens - room + output_tokens * room_by_output
    return cost + output_tokens * room_rate * lacking if lacking > 0 else cost
