"""Sampling parameters and routing headers, read from a request."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from loadtest.engine.api.errors import ApiError, bad_request, invalid
from loadtest.engine.structured import Prescription, read_prescription

_MAX_N: Final = 16384


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The fields that affect the simulated engine."""

    n: int = 1
    _: KW_ONLY
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    cache_salt: str = ""
    return_token_ids: bool = False
    echo: bool = False
    top_logprobs: int | None = None
    seed: int = 0
    prescription: Prescription | None = None


def read_sampling(body: dict[str, Any], max_tokens_fields: tuple[str, ...], max_model_len: int) -> SamplingParams:
    """Validate the used sampling parameters as vLLM does."""
    stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options is not None and not stream:
        raise ApiError(
            400,
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            param="stream_options",
        )
    options = options or {}
    n = _integer(body, "n", 1)
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > _MAX_N:
        raise bad_request(
            f"n must be at most {_MAX_N}, got {n}. "
            "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        )
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    _number(body, "temperature", 0.0, None)
    top_p = _number(body, "top_p", None, 1.0)
    if top_p is not None and top_p <= 0:
        raise bad_request(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    include_usage = bool(options.get("include_usage"))
    return SamplingParams(
        n=n,
        max_tokens=_max_tokens(body, max_tokens_fields, max_model_len),
        min_tokens=_integer(body, "min_tokens", 0),
        ignore_eos=bool(body.get("ignore_eos")),
        stop=_stop(body.get("stop")),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        cache_salt=salt or "",
        return_token_ids=bool(body.get("return_token_ids")),
        echo=bool(body.get("echo")),
        top_logprobs=_top_logprobs(body),
        seed=_integer(body, "seed", 0),
        prescription=_prescription(body),
    )


def _prescription(body: dict[str, Any]) -> Prescription | None:
    if not ("tools" in body or "response_format" in body or "structured_outputs" in body or "text" in body):
        return None
    try:
        prescription = read_prescription(body)
        if prescription is not None:
            prescription.text(0)
    except (TypeError, ValueError, AttributeError) as error:
        raise bad_request(f"The schema cannot be used: {error}.", "response_format") from error
    return prescription


def _max_tokens(body: dict[str, Any], fields: tuple[str, ...], max_model_len: int) -> int | None:
    for field in fields:
        if body.get(field) is None:
            continue
        value = _integer(body, field, 0)
        if value < 1 and not (value == 0 and field == "max_tokens" and body.get("echo")):
            raise bad_request(f"{field} must be at least 1, got {value}.", field, value)
        if value > max_model_len:
            raise bad_request(
                f"{field}={value} cannot be greater than max_model_len=max_total_tokens={max_model_len}. "
                "Please request fewer output tokens.",
                field,
                value,
            )
        return value
    return None


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,) if value else ()
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(item for item in value if item)
    raise invalid("body.stop", "string_type", "Input should be a valid string", value)


def _top_logprobs(body: dict[str, Any]) -> int | None:
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        return _integer(body, "top_logprobs", 0)
    return _integer(body, "logprobs", 0)


def _integer(body: dict[str, Any], field: str, default: int) -> int:
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        text = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid(f"body.{field}", "int_parsing" if isinstance(value, str) else "int_type", text, value)
    return value


def _number(body: dict[str, Any], field: str, least: float | None, most: float | None) -> float | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = "Input should be a valid number, unable to parse string as a number"
        raise invalid(f"body.{field}", "float_parsing" if isinstance(value, str) else "float_type", text, value)
    number = float(value)
    if least is not None and number < least:
        raise bad_request(f"{field} must be non-negative, got {number}.", field, number)
    if most is not None and number > most:
        raise bad_request(f"{field} must be in (0, {most:g}], got {number}.", field, number)
    return number


_FULL_REPORT = "full"


@dataclass(frozen=True, slots=True)
class Steering:
    """A data-parallel rank, a session that KV events name, and whether they include blocks found in the cache."""

    rank: int | None = None
    session_id: str | None = None
    reports_hits: bool = False


def read_steering(headers: Mapping[str, str], body: Mapping[str, Any]) -> Steering:
    """The values of the headers and the body, with vLLM's leniency: unreadable ones are ignored."""
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
