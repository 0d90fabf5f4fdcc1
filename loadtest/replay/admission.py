"""Arms of admission: what keeps a request out of an engine, with placement and routing the same in all of them."""

from __future__ import annotations

from dataclasses import dataclass

_NO_LIMIT = 1 << 20  # sequences
_SEPARATOR = ", "


@dataclass(frozen=True, slots=True)
class Admission:
    """Which of the gateway's bounds hold. `limit` is of sequences on each engine; None = what the engine runs at once.

    `window`: little prefill may be ahead; `ledger`: KV cache is reserved; `adaptive`: the limit follows what the
    engine's metrics show.
    """

    name: str
    limit: int | None = None
    window: bool = True
    ledger: bool = False
    adaptive: bool = False

    def cap(self, max_num_seqs: int) -> int:
        """Sequences that each engine may be given at once."""
        return max_num_seqs if self.limit is None else self.limit


NONE = Admission("none", _NO_LIMIT, window=False)
SLOTS = Admission("slots")
LEDGER = Admission("ledger", ledger=True)
LIMITER = Admission("limiter", adaptive=True)
GATEWAY = Admission("adaptive", ledger=True, adaptive=True)
_NAMED = {arm.name: arm for arm in (NONE, SLOTS, LEDGER, LIMITER, GATEWAY)}
WAYS = (*_NAMED, "static:N")


def admission_of(name: str) -> Admission:
    """The arm of that name. Raises ValueError."""
    kind, colon, limit = name.partition(":")
    if kind == "static" and colon and limit.isdecimal() and int(limit) > 0:
        return Admission(name, int(limit))
    if name not in _NAMED:
        raise ValueError(f"--admission: {name!r} unknown; there are {', '.join(WAYS)}")
    return _NAMED[name]


def with_admission(policy: str, arm: str) -> str:
    """What a policy of the gateway is called under an arm of admission."""
    return f"{policy}{_SEPARATOR}{arm}"


def parted(name: str) -> tuple[str, Admission | None]:
    """Policy and arm of a name; None where the name has no arm."""
    policy, _, arm = name.partition(_SEPARATOR)
    return policy, admission_of(arm) if arm else None
