"""What a request says of where it runs and what is told of it, beside its prompt and sampling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FULL_REPORT = "full"


@dataclass(frozen=True, slots=True)
class Steering:
    """A data-parallel rank, a session that KV events name, and whether they tell of blocks found in the cache."""

    rank: int | None = None
    session_id: str | None = None
    reports_hits: bool = False


def read_steering(headers: Mapping[str, str], body: Mapping[str, Any]) -> Steering:
    """What the headers and the body say, with vLLM's leniency: what cannot be read is ignored."""
    extra = body.get("vllm_xargs")
    if not isinstance(extra, Mapping):
        extra = {}
    names = (body.get("session_id"), headers.get("X-Session-ID"), extra.get("session_id"))
    return Steering(
        rank=_rank(headers.get("X-data-parallel-rank")),
        session_id=next((name for name in names if isinstance(name, str) and name), None),
        reports_hits=extra.get("kv_cache_report_mode") == _FULL_REPORT,
    )


def _rank(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
