"""Running estimates learned from answers: bytes per token, known prompts, answer lengths, prefill seconds.

Seconds per uncached prefill token come from times to first token, one value for each model. An engine's relative cost
comes from the pace of its streams, corrected for its load: otherwise the faster-looking engine would get more requests,
and look slower.

Answer lengths are a mean and a high quantile by model and tenant. An answer that its `max_tokens` cut short only shows
that it would have been longer. So there are two histograms, of complete and of cut answers; together they estimate the
lengths without a limit (Kaplan-Meier). Old answers fade.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from math import log2
from typing import Any, Final

from gateway.core.request import Demand, Usage

_MAX_KNOWN: Final = 65536
_FORGOTTEN: Final = 1024  # per removal: finding the first entry of a dict after removals at its front is slow
_MOST_MODELS: Final = 1024
_PROMPTS: Final = 50  # in a running mean; those before fade
_ANSWERS: Final = 500
# The length of an answer in a later prompt may differ by this factor, and 64 bytes, from the generated text.
_ALIKE: Final = 2.0


@dataclass(slots=True, init=False)
class Measure:
    """A prompt's tokens, its first part whose tokens an engine has counted, and whether its last answer is whole.

    A client may leave out a model's reasoning; then cache and conversation differ.
    """

    prompt_tokens: int
    anchor_size: int
    anchor_tokens: int
    answer_is_whole: bool

    def __init__(
        self, prompt_tokens: int, anchor_size: int = 0, anchor_tokens: int = 0, answer_is_whole: bool = False
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.anchor_size = anchor_size
        self.anchor_tokens = anchor_tokens
        self.answer_is_whole = answer_is_whole


class _Means:
    """Running means of one model: bytes per token, with the number of prompts seen, and answer length, of answers."""

    __slots__ = ("answers", "bytes_per_token", "output_tokens", "prompts")

    def __init__(self, bytes_per_token: float, output_tokens: float, prompts: int = 0, *, answers: int = 0) -> None:
        self.bytes_per_token = bytes_per_token
        self.output_tokens = output_tokens
        self.prompts = prompts
        self.answers = answers

    def learn(self, prompt_bytes: int, prompt_tokens: int, output_tokens: int) -> None:
        if prompt_tokens >= 64 and prompt_bytes >= 256:
            if self.prompts < _PROMPTS:
                self.prompts += 1
            sample = prompt_bytes / prompt_tokens
            sample = 0.5 if sample < 0.5 else sample if sample < 16.0 else 16.0
            self.bytes_per_token += 1 / self.prompts * (sample - self.bytes_per_token)
        if output_tokens > 0:
            if self.answers < _ANSWERS:
                self.answers += 1
            self.output_tokens += (output_tokens - self.output_tokens) / self.answers


class Estimates:
    """Estimates of each model, and of prompts that engines have counted. Means start at those given here."""

    def __init__(self, bytes_per_token: float = 4.0, output_tokens: float = 200.0) -> None:
        self._start = _Means(bytes_per_token, output_tokens)
        self._means: dict[str, _Means] = {}
        self._known: dict[int, tuple[int, int]] = {}  # tokens of prompt and answer, by the prompt's last key

    def bytes_per_token(self, model: str) -> float:
        """Prompt bytes that make one token of this model."""
        return self._means.get(model, self._start).bytes_per_token

    def measure(
        self, model: str, keys: tuple[int, ...], edges: tuple[int, ...], size: int, turn: int, turn_end: int
    ) -> Measure:
        """The tokens of a prompt of `size` bytes; `turn` and `turn_end` as in `Demand`."""
        ratio, anchor, tokens, is_whole = self._means.get(model, self._start).bytes_per_token, 0, 0, False
        if turn and (known := self._known.get(keys[turn - 1])) is not None:
            (tokens, output), anchor, after = known, edges[turn - 1], edges[turn_end - 1]
            expected = output * ratio
            is_whole = expected / _ALIKE - 64 <= after - anchor <= expected * _ALIKE + 64
            if is_whole:
                anchor, tokens = after, tokens + output
        if keys and edges[-1] == size and (known := self._known.get(keys[-1])) is not None:
            return Measure(known[0], size, known[0], is_whole)
        return Measure(max(1, tokens + int((size - anchor) / ratio)), anchor, tokens, is_whole)

    def expected_output_tokens(self, model: str, limit: int | None) -> float:
        """The expected length of an answer: the mean, or the client's `limit` if that is less; None = no limit."""
        expected = self._means.get(model, self._start).output_tokens
        return expected if limit is None or limit > expected else limit

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int, output_tokens: int) -> None:
        """Learn from a response's usage. Short prompts are mostly chat template: the ratio ignores them."""
        means = self._means.get(model)
        if means is None:
            if len(self._means) > _MOST_MODELS:  # adapters come and go
                del self._means[next(iter(self._means))]
            means = self._means[model] = _Means(self._start.bytes_per_token, self._start.output_tokens)
        means.learn(prompt_bytes, prompt_tokens, output_tokens)

    def learned(self) -> tuple[dict[str, tuple[float, float, int, int]], list[tuple[int, tuple[int, int]]]]:
        """Means by model, and known prompts; the input of `start_from`."""
        means = {
            model: (each.bytes_per_token, each.output_tokens, each.prompts, each.answers)
            for model, each in self._means.items()
        }
        return means, list(self._known.items())

    def start_from(self, means: dict[str, Any], known: list[Any]) -> None:
        """Take over values learned by another process."""
        for model, (bytes_per_token, output_tokens, prompts, answers) in means.items():
            self._means[model] = _Means(bytes_per_token, output_tokens, prompts, answers=answers)
        for key, (prompt_tokens, answer_tokens) in known:
            self._known[key] = prompt_tokens, answer_tokens

    def remember(self, prompt_key: int, prompt_tokens: int, output_tokens: int) -> None:
        known = self._known
        if prompt_key in known:
            del known[prompt_key]  # the order is that of the last answers
        known[prompt_key] = prompt_tokens, output_tokens
        if len(known) > _MAX_KNOWN + _FORGOTTEN:
            for key in [*islice(known, _FORGOTTEN)]:
                del known[key]


_MIN_TOKENS: Final = 64
LEAST_PACED_TOKENS: Final = 8  # of a stream: shorter ones say little about the pace
_CLIP = (0.25, 4.0)
_LEAST_WEIGHT: Final = 0.05
_LEAST_MEAN_WEIGHT: Final = 0.0125
_B_RANGE = (1e-7, 1e-1)
_STEP: Final = 0.02  # relative change before the model follows: every change voids cached costs
_BUDGET_FLOOR_SECONDS: Final = 0.02  # covers the network and tokenization


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


class Calibrations:
    """Owner of each model's learned prefill costs. `family` maps a model to the model that its engines serve: an
    adapter's base, or the first of several names."""

    def __init__(self, start: CostModel, family: Callable[[str], str] = lambda model: model) -> None:
        self._start = start
        self._family = family
        self._unknown = Calibration(start)
        self._known: dict[str, Calibration] = {}

    def __len__(self) -> int:
        return len(self._known)

    def apply(self, start: CostModel) -> None:
        """Take over another cost model: its `b` for models without learned values, the rest for all."""
        if start == self._start:
            return
        self._start = start
        for calibration in (self._unknown, *self._known.values()):
            calibration.apply(start)

    def of(self, model: str) -> "Calibration":
        """The calibration of a model, to be read only."""
        return self._known.get(self._family(model), self._unknown)

    def learned(self) -> dict[str, tuple[float, int, float, int]]:
        """Each model's learned state, as `start_from` takes it."""
        return {model: each.learned for model, each in self._known.items()}

    def start_from(self, learned: dict[str, Any]) -> None:
        """Take over values learned by another process."""
        for model, values in learned.items():
            self._known[model] = Calibration(self._start)
            self._known[model].start_from(*values)

    def learning(self, model: str) -> "Calibration":
        """The calibration to update, of a model that has engines."""
        family = self._family(model)
        known = self._known.get(family)
        if known is None:
            if len(self._known) >= _MOST_MODELS:
                del self._known[next(iter(self._known))]
            known = self._known[family] = Calibration(self._start)
        return known


class Calibration:
    """Owner of one model's cost model in force."""

    def __init__(self, model: CostModel) -> None:
        self._b = model.b  # as learned; the model's follows in steps
        self._samples = 0
        self._mean_pace = 0.0  # logarithm of the seconds of a token, over those predicted: a mean over the engines
        self._paces = 0
        self._use(model)

    def apply(self, start: CostModel) -> None:
        """Take over another start value, if nothing is learned yet, and the other constants."""
        if not self._samples:
            self._b = start.b
        is_start = self._b == start.b
        self._use(start if is_start else CostModel(self._b, start.decode_weight, start.max_batched_tokens))

    def _use(self, model: CostModel) -> None:
        """Take over the model, and the prefill of one token budget (the most tokens of an engine step)."""
        self.model = model
        self.budget_seconds = max(_BUDGET_FLOOR_SECONDS, model.max_batched_tokens * model.b)

    def first_token(self, uncached_tokens: int, predicted_seconds: float, seconds: float) -> None:
        """Learn from a request that was alone in prefill on its engine: of a list of inputs, the whole answer."""
        if uncached_tokens < _MIN_TOKENS or predicted_seconds <= 0 or seconds <= 0:
            return
        self._samples += 1
        weight = max(_LEAST_WEIGHT, 1 / (self._samples + 1))
        ratio = min(_CLIP[1], max(_CLIP[0], seconds / predicted_seconds))
        self._b = min(_B_RANGE[1], max(_B_RANGE[0], self._b * ratio**weight))
        self._approach()

    def _approach(self) -> None:
        if abs(self._b - self.model.b) > _STEP * self.model.b:
            self._use(CostModel(self._b, self.model.decode_weight, self.model.max_batched_tokens))

    @property
    def learned(self) -> tuple[float, int, float, int]:
        """The inputs of `start_from`, in its order."""
        return self._b, self._samples, self._mean_pace, self._paces

    def start_from(self, b: float, samples: int, mean_pace: float, paces: int) -> None:
        """Take over values learned by another process."""
        self._b, self._samples, self._mean_pace, self._paces = b, samples, mean_pace, paces
        self._approach()

    def paced(self, pace: float) -> float:
        """Learn from the pace of a stream, a logarithm. Returns by how much it exceeds the mean of all streams."""
        self._paces += 1
        self._mean_pace += max(_LEAST_MEAN_WEIGHT, 1 / self._paces) * (pace - self._mean_pace)
        return pace - self._mean_pace

    def at_most(self, uncached_tokens: int, predicted_seconds: float, seconds: float) -> None:
        """The same for a request whose first token was not seen: `seconds` is the time of its whole answer."""
        if seconds < predicted_seconds:
            self.first_token(uncached_tokens, predicted_seconds, seconds)


_STEPS: Final = 4  # buckets for each doubling of the length: the edges are 19 % apart
_BUCKETS: Final = 20 * _STEPS  # up to a million tokens
_FADES: Final = 0.98  # of the weight of an answer with each later one: fifty answers' worth are remembered
_REFRESH: Final = 25  # answers between two computations of the quantile, once there are many
_FEW: Final = 20.0  # answers; for a tenant with fewer, the model's lengths are used
_UNKNOWN_TOKENS: Final = 512
_MAX_TENANTS: Final = 1024  # and models

_EDGES: Final = tuple(2 ** ((number + 1) / _STEPS) for number in range(_BUCKETS))
_MIDDLES: Final = tuple(2 ** ((number + 0.5) / _STEPS) for number in range(_BUCKETS))


@dataclass(slots=True, eq=False)
class _Lengths:
    """A fading histogram of the lengths of answers, their mean and quantile; of a model, also the excess of its
    prompts.
    """

    excess_tokens: int = 0  # of a prompt beyond its estimate, which does not see the chat template
    _: KW_ONLY
    answers: int = 0
    mean_tokens: int = _UNKNOWN_TOKENS
    quantile_tokens: int = _UNKNOWN_TOKENS
    _ended: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    _cut: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    _weight: float = 1.0  # of the next answer: growing weights cost less than shrinking all others
    _unseen: int = 0
    _mean_excess: float = 0.0
    _prompts: int = 0

    def add(self, tokens: int, share: float, *, was_cut: bool) -> None:
        """Add an answer. `was_cut`: its limit ended it; `share`: of answers that the quantile is not below."""
        bucket = int(_STEPS * log2(tokens)) if tokens > 1 else 0
        if bucket >= _BUCKETS:
            bucket = _BUCKETS - 1
        (self._cut if was_cut else self._ended)[bucket] += self._weight
        self._weight /= _FADES
        if self._weight > 1e100:
            self._scale(1 / self._weight)
        self.answers += 1
        self._unseen += 1
        if self.answers <= _FEW or self._unseen >= _REFRESH:
            self._unseen = 0
            self._estimate(share)

    def learned(self) -> list[Any]:
        """The input of `start_from`: plain numbers and lists of them."""
        weights = self._ended.copy(), self._cut.copy(), self._weight
        return [*weights, self.answers, self._mean_excess, self._prompts, self.excess_tokens]

    def start_from(self, learned: list[Any], share: float) -> None:
        """Take over values learned by another process."""
        self._ended, self._cut, self._weight, self.answers = learned[:4]
        self._mean_excess, self._prompts, self.excess_tokens = learned[4:]
        self._estimate(share)

    def exceeded(self, tokens: int) -> None:
        """Learn from a prompt with this many more tokens than estimated."""
        if self._prompts < _PROMPTS:
            self._prompts += 1
        self._mean_excess += (tokens - self._mean_excess) * (1 / self._prompts)
        if not -0.5 < self._mean_excess - self.excess_tokens < 0.5:
            self.excess_tokens = round(self._mean_excess) if self._mean_excess > 0 else 0

    def _estimate(self, share: float) -> None:
        """The mean, and the length that this share of answers does not exceed. Answers longer than all that ended count
        as twice the longest one, or more.
        """
        left, lasting, longest, longer = sum(self._ended, 0.0) + sum(self._cut, 0.0), 1.0, 0, 1 - share
        negligible, mean, quantile = 1e-6 * left, 0.0, 0.0
        for bucket, (ended, cut) in enumerate(zip(self._ended, self._cut, strict=True)):
            here = ended + cut
            if here <= negligible:
                continue
            before = lasting
            lasting *= 1 - ended / left
            mean += (before - lasting) * _MIDDLES[bucket]
            if not quantile and lasting <= longer:
                within = (before - longer) / (before - lasting)
                quantile = _EDGES[bucket] * 2 ** ((within - 1) / _STEPS)
            left -= here
            longest = bucket
        unknown = max(float(_UNKNOWN_TOKENS), 2 * _EDGES[longest])
        self.mean_tokens = int(mean + lasting * unknown)
        self.quantile_tokens = max(int(quantile or unknown), self.mean_tokens)

    def _scale(self, by: float) -> None:
        self._ended = [weight * by for weight in self._ended]
        self._cut = [weight * by for weight in self._cut]
        self._weight *= by


class OutputLengths:
    """Lengths of answers by model and tenant, for reservations."""

    def __init__(self, quantile: float = 0.9, max_tenants: int = _MAX_TENANTS, prompt_excess_tokens: int = 0) -> None:
        self._share = quantile
        self._unknown_excess_tokens = prompt_excess_tokens
        self._max_tenants = max_tenants
        self._models: dict[str, _Lengths] = {}
        self._tenants: OrderedDict[tuple[str, str], _Lengths] = OrderedDict()  # least recently used first

    def __repr__(self) -> str:
        return f"<OutputLengths of {len(self._models)} models, {len(self._tenants)} tenants>"

    def learned(self) -> list[tuple[str, str, list[Any]]]:
        """The input of `start_from`: models, without a tenant, and tenants."""
        models = [(model, "", each.learned()) for model, each in self._models.items()]
        return [*models, *[(model, tenant, each.learned()) for (model, tenant), each in self._tenants.items()]]

    def start_from(self, learned: list[Any]) -> None:
        """Take over values learned by another process."""
        for model, tenant, values in learned:
            known = _Lengths()
            known.start_from(values, self._share)
            if tenant:
                self._tenants[model, tenant] = known
            else:
                self._models[model] = known

    def expected(self, model: str, tenant: str, limit: int | None) -> tuple[int, int]:
        """Tokens to reserve for an answer, and its margin: the additional tokens at the high quantile.

        The former include the usual excess of prompts over their estimate. `limit` is the client's, None = no limit.
        """
        of_model = self._models.get(model)
        known = self._tenants.get((model, tenant)) if tenant else None
        if known is None or known.answers < _FEW:
            known = of_model
        mean = most = _UNKNOWN_TOKENS
        if known is not None:
            mean, most = known.mean_tokens, known.quantile_tokens
        if limit is not None and limit < most:
            most = limit
            if most < mean:
                mean = most
        return mean + (self._unknown_excess_tokens if of_model is None else of_model.excess_tokens), most - mean

    def answered(self, demand: Demand, usage: Usage) -> None:
        """Learn from a request's usage; several sequences count as answers of equal length. An answer that was cut and
        continued counts once, at its end, and whole.
        """
        if demand.sequences and usage.prompt_tokens:
            of_model = self._models.get(demand.model) or self._new_model(demand.model)
            of_model.exceeded((usage.prompt_tokens - demand.prompt_tokens) // demand.sequences)
            if usage.completion_tokens > 0:
                limit, earlier = demand.output_tokens, demand.generated_tokens
                tokens = usage.completion_tokens // demand.sequences + earlier
                self.learn(demand.model, demand.tenant, tokens, None if limit is None else limit + earlier)

    def learn(self, model: str, tenant: str, tokens: int, limit: int | None) -> None:
        """Learn the length of one answer; `limit` is the client's, None = no limit."""
        was_cut = limit is not None and tokens >= limit
        of_model = self._models.get(model) or self._new_model(model)
        of_model.add(tokens, self._share, was_cut=was_cut)
        if not tenant:
            return
        known = self._tenants.get((model, tenant))
        if known is None:
            known = self._tenants[model, tenant] = _Lengths()
            if len(self._tenants) > self._max_tenants:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end((model, tenant))
        known.add(tokens, self._share, was_cut=was_cut)

    def _new_model(self, model: str) -> _Lengths:
        if len(self._models) >= _MAX_TENANTS:
            del self._models[next(iter(self._models))]
        known = self._models[model] = _Lengths(self._unknown_excess_tokens)
        return known
