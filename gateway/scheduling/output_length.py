"""How long answers become, learned for each model and tenant: what to reserve for one that has just begun.

An answer that the client's own limit cut short only says that it would have been longer. So lengths are kept as a
histogram of answers that ended and one of answers that were cut, and the quantile is that of the lengths that answers
would have without a limit (the Kaplan-Meier estimate). Old answers fade, so that a change is followed.
"""

from collections import OrderedDict
from math import log2

from gateway.request import Ask, Usage

_STEPS = 4  # buckets for each doubling of the length: the edges are 19 % apart
_BUCKETS = 20 * _STEPS  # up to a million tokens
_FADES = 0.98  # of the weight of an answer with each later one: fifty answers' worth are remembered
_REFRESH = 25  # answers between two looks at the quantile, once there are many
_FEW = 20.0  # answers; a tenant with fewer is taken for what is usual with the model
_UNKNOWN_TOKENS = 512.0
_MAX_TENANTS = 1024  # and models
_LEAST_WEIGHT = 0.02  # of one prompt in what prompts are usually longer than estimated

_EDGES = tuple(2 ** ((number + 1) / _STEPS) for number in range(_BUCKETS))


class _Lengths:
    """A fading histogram of the lengths of answers, and its quantile."""

    __slots__ = ("_cut", "_ended", "_unseen", "_weight", "answers", "quantile_tokens")

    def __init__(self) -> None:
        self._ended = [0.0] * _BUCKETS
        self._cut = [0.0] * _BUCKETS
        self._weight = 1.0  # of the next answer: growing weights cost less than shrinking all others
        self._unseen = 0
        self.answers = 0
        self.quantile_tokens = _UNKNOWN_TOKENS

    def add(self, tokens: int, share: float, *, was_cut: bool) -> None:
        """An answer of so many tokens, and whether its limit ended it; `share` is the quantile that is wanted."""
        bucket = min(_BUCKETS - 1, int(_STEPS * log2(tokens))) if tokens > 1 else 0
        (self._cut if was_cut else self._ended)[bucket] += self._weight
        self._weight /= _FADES
        if self._weight > 1e100:
            self._scale(1 / self._weight)
        self.answers += 1
        self._unseen += 1
        if self.answers <= _FEW or self._unseen >= _REFRESH:
            self._unseen = 0
            self.quantile_tokens = self._quantile(share)

    def _quantile(self, share: float) -> float:
        """The length that this share of answers does not exceed. If none can be told: twice the longest, or usual."""
        left, lasting, longest, longer = sum(self._ended) + sum(self._cut), 1.0, 0, 1 - share
        negligible = 1e-6 * left
        for bucket, (ended, cut) in enumerate(zip(self._ended, self._cut, strict=True)):
            here = ended + cut
            if here <= negligible:
                continue
            before = lasting
            lasting *= 1 - ended / left
            if lasting <= longer:
                within = (before - longer) / (before - lasting)
                return _EDGES[bucket] * 2 ** ((within - 1) / _STEPS)
            left -= here
            longest = bucket
        return max(_UNKNOWN_TOKENS, 2 * _EDGES[longest])

    def _scale(self, by: float) -> None:
        self._ended = [weight * by for weight in self._ended]
        self._cut = [weight * by for weight in self._cut]
        self._weight *= by


class OutputLengths:
    """Lengths of answers by model and tenant. Costs reckon with the mean; what is reserved is a high quantile."""

    def __init__(self, quantile: float = 0.9, max_tenants: int = _MAX_TENANTS, prompt_excess_tokens: int = 0) -> None:
        self._share = quantile
        self._unknown_excess_tokens = prompt_excess_tokens
        self._max_tenants = max_tenants
        self._models: dict[str, _Lengths] = {}
        self._excess: dict[str, tuple[float, int]] = {}  # mean and count, by model
        self._tenants: OrderedDict[tuple[str, str], _Lengths] = OrderedDict()  # the longest unheard of first

    def __repr__(self) -> str:
        return f"<OutputLengths of {len(self._models)} models, {len(self._tenants)} tenants>"

    def expected(self, model: str, tenant: str, limit: int | None) -> int:
        """Tokens to reserve for an answer whose client allows it so many; None = any number."""
        known = self._tenants.get((model, tenant)) if tenant else None
        if known is None or known.answers < _FEW:
            known = self._models.get(model)
        tokens = _UNKNOWN_TOKENS if known is None else known.quantile_tokens
        return int(tokens) if limit is None or limit > tokens else limit

    def prompt_excess_tokens(self, model: str) -> int:
        """By how much prompts are longer than was estimated, in the mean: a chat template is not seen here."""
        known = self._excess.get(model)
        return self._unknown_excess_tokens if known is None else max(0, round(known[0]))

    def answered(self, ask: Ask, usage: Usage) -> None:
        """A request's usage; that of several sequences is taken for as many answers of the same length."""
        if not ask.sequences or not usage.prompt_tokens:
            return
        mean, count = self._excess.get(ask.model, (0.0, 0))
        excess = usage.prompt_tokens - ask.prompt_tokens
        if len(self._excess) > _MAX_TENANTS:
            del self._excess[next(iter(self._excess))]
        self._excess[ask.model] = mean + (excess - mean) * max(_LEAST_WEIGHT, 1 / (count + 1)), count + 1
        if usage.completion_tokens > 0:
            self.learn(ask.model, ask.tenant, usage.completion_tokens // ask.sequences, ask.output_tokens)

    def learn(self, model: str, tenant: str, tokens: int, limit: int | None) -> None:
        """An answer of a model ended, with so many tokens of those that its client allowed."""
        was_cut = limit is not None and tokens >= limit
        self._of_model(model).add(tokens, self._share, was_cut=was_cut)
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

    def _of_model(self, model: str) -> _Lengths:
        known = self._models.get(model)
        if known is None:
            if len(self._models) >= _MAX_TENANTS:
                del self._models[next(iter(self._models))]
            known = self._models[model] = _Lengths()
        return known
