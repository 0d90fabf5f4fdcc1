"""Which configurations a plan comes to, and which of them vLLM would refuse anyway. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import orjson

from loadtest.sweep.plan import FlagValue, SweepPlan

_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
# Other names that vLLM gives them.
_SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size"}


@dataclass(frozen=True, slots=True, eq=False)
class Configuration:
    """A value for each flag of the plan, in the plan's order. Equal only to itself: to Python, 1 would be True."""

    flags: tuple[tuple[str, FlagValue], ...]

    @property
    def label(self) -> str:
        """As it is shown in tables and logs."""
        return " ".join(f"{flag}={shown(value)}" for flag, value in self.flags) or "as it is"

    def arguments(self) -> list[str]:
        """The flags appended to the server's command line, where the last value of a flag counts."""
        return [word for flag, value in self.flags for word in spelled(flag, value)]


@dataclass(frozen=True, slots=True)
class Space:
    """The configurations to try, and the excluded ones with reasons."""

    configurations: list[Configuration]
    left_out: list[tuple[Configuration, str]]


def shown(value: FlagValue) -> str:
    """A value as people read it."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    return orjson.dumps(value).decode() if isinstance(value, dict) else str(value)


def spelled(flag: str, value: FlagValue) -> list[str]:
    """The words of a command line that set it; none where the value is null."""
    if value is None:
        return []
    if isinstance(value, bool):
        if "." in flag:
            return [f"--{flag}={'true' if value else 'false'}"]
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", orjson.dumps(value).decode() if isinstance(value, dict) else str(value)]


def space_of(plan: SweepPlan) -> Space:
    """Every combination of the plan's values, in its order; the last flag changes first."""
    space = Space([], [])
    fixed = fixed_flags(plan)
    for values in product(*plan.flags.values()):
        configuration = Configuration(tuple(zip(plan.flags, values, strict=True)))
        chosen = {flag: value for flag, value in configuration.flags if value is not None}
        why = next(_complaints({**fixed, **chosen}, dict(configuration.flags), plan), None)
        if why is None:
            space.configurations.append(configuration)
        else:
            space.left_out.append((configuration, why))
    return space


def fixed_flags(plan: SweepPlan) -> dict[str, FlagValue]:
    """The values in the server's own command of flags that a constraint may need."""
    if plan.serve.simulated is not None:
        return dict(plan.serve.simulated)
    return flags_in(plan.serve.command or [])


def flags_in(words: Sequence[str]) -> dict[str, FlagValue]:
    """Flags of a command line and their values, numbers as numbers."""
    found: dict[str, FlagValue] = {}
    for number, word in enumerate(words):
        name, has_value, value = word.partition("=")
        name = _SHORT.get(name, name)
        following = words[number + 1] if number + 1 < len(words) else "--"
        if not word.startswith("-") or name in ("-", "--"):
            continue
        name = name.lstrip("-").replace("_", "-")
        if has_value:
            found[name] = _number(value)
        elif not following.startswith("-"):
            found[name] = _number(following)
        elif name.startswith("no-"):
            found[name.removeprefix("no-")] = False
        else:
            found[name] = True
    return found


def gpus_of(flags: Mapping[str, FlagValue]) -> int:
    """GPUs that a server with these flags takes."""
    needed = 1
    for flag in _PARALLEL:
        size = flags.get(flag)
        needed *= size if isinstance(size, int) and not isinstance(size, bool) else 1
    return needed


def _complaints(flags: Mapping[str, FlagValue], own: Mapping[str, FlagValue], plan: SweepPlan) -> Iterator[str]:
    """The reason to skip a configuration. Only known values count: vLLM's defaults depend on the GPU."""
    for part in plan.exclude:
        if all(own.get(flag) == value and type(own.get(flag)) is type(value) for flag, value in part.items()):
            yield "excluded by the plan"
    needed = gpus_of(flags)
    if plan.gpus is not None and needed > plan.gpus:
        yield f"it needs {needed} GPUs of {plan.gpus}"
    batched, seqs, longest = (
        _tokens(flags.get(flag)) for flag in ("max-num-batched-tokens", "max-num-seqs", "max-model-len")
    )
    if batched is not None and seqs is not None and batched < seqs:
        # With chunked prefill as well: each running sequence needs a token of every step.
        yield f"max-num-batched-tokens {batched} is below max-num-seqs {seqs}"
    if flags.get("max-num-batched-tokens") == 0:
        yield "max-num-batched-tokens 0 computes nothing: give 1 or more, or null for the default"
    whole = flags.get("enable-chunked-prefill") is False
    if whole and batched is not None and longest is not None and batched < longest:
        yield f"without chunked prefill, max-num-batched-tokens {batched} must hold max-model-len {longest}"
    share = flags.get("gpu-memory-utilization")
    if isinstance(share, int | float) and not 0 < share <= 1:
        yield f"gpu-memory-utilization {share} is not above 0 and at most 1"


def _tokens(value: FlagValue) -> int | None:
    """A count, also as vLLM lets it be written: 8k is 8,000, 8K is 8,192."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value > 0 else None
    if not isinstance(value, str) or (written := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", value)) is None:
        return None
    return int(float(written[1]) * {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[written[2]])


def _number(text: str) -> FlagValue:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
