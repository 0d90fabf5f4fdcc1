"""Queries the target's facts before the run, and its counters before and after."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from loadtest.access import Access, certificate_hint
from loadtest.workloads.prompts import Corpus

_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
_SAMPLE_BYTES = 8192
_COUNTED_SUFFIXES = ("_total", "_sum", "_count")


class TargetError(Exception):
    """The target cannot be driven; the message says why, for the user."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target's own reports."""

    models: list[str]
    server: dict[str, str] = field(default_factory=dict)
    bytes_per_token: float | None = None
    _: KW_ONLY
    metrics_url: str | None = None
    # Of the engines behind it, and of its admin port.
    pages_behind: Mapping[str, str] = field(default_factory=dict)


def base_url(url: str) -> str:
    """The URL without a trailing slash or `/v1`, so that either form may be given."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


async def look_at(url: str, access: Access, model: str | None = None) -> Target:
    """The models the target serves, and, where it reports them, its version and how it cuts our prose into tokens.

    With a model that is given, the target needs no list of models.
    """
    try:
        async with _session(access, dict(access.headers)) as session:
            async with session.get(f"{url}/v1/models") as response:
                body, status = await response.read(), response.status
                server = {"server": response.headers["server"]} if "server" in response.headers else {}
            models = _model_names(body) if status == 200 else []
            if not models and model is None:
                reason = body[:200].decode("utf-8", "replace")
                raise TargetError(
                    f"{url}/v1/models answers {status}, without models: {reason}. Give --model to do without."
                )
            models = models or [model or ""]
            return Target(
                models,
                server | await _version(session, url),
                await _bytes_per_token(session, url, model or models[0]),
                metrics_url=f"{url}/metrics" if await _is_engine(session, url) else None,
            )
    except (aiohttp.ClientError, OSError) as error:
        raise TargetError(f"cannot reach {url}: {error or type(error).__name__}{certificate_hint(error)}") from None


def _session(access: Access, headers: Mapping[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=access.tls()), timeout=_TIMEOUT, headers=dict(headers)
    )


async def read_counters(url: str, access: Access, target: str) -> dict[str, float]:
    """Every counter (and histogram sum and count) of a Prometheus page, by name and labels.

    The target's headers are sent to its own page, and to no other server.
    """
    try:
        async with _session(access, access.headers_of(url, target)) as session, session.get(url) as response:
            if response.status != 200:
                raise TargetError(f"{url} answers {response.status}")
            return counters(await response.text())
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise TargetError(f"cannot read metrics from {url}: {error or type(error).__name__}") from None


def counters(page: str) -> dict[str, float]:
    """The counters of a Prometheus page; the process's own and Python's are left out."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        if family.type not in ("counter", "histogram", "summary") or family.name.startswith(("python_", "process_")):
            continue
        for sample in family.samples:
            if sample.name.endswith(_COUNTED_SUFFIXES):
                labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def change(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The counts in between; a counter that fell was reset, and its new value is the best estimate."""
    delta = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: after[name] if moved < 0 else moved for name, moved in sorted(delta.items()) if moved}


def _model_names(body: bytes) -> list[str]:
    """None, if the answer is no list of models."""
    try:
        return [str(model["id"]) for model in orjson.loads(body)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []


async def _is_engine(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether the page of metrics is there, and an engine's."""
    async with session.get(f"{url}/metrics") as response:
        return response.status == 200 and b"vllm:num_requests_running" in await response.read()


async def _version(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    async with session.get(f"{url}/version") as response:
        answer = await _object(response)
    return {"version": str(answer["version"])} if "version" in answer else {}


async def _bytes_per_token(session: aiohttp.ClientSession, url: str, model: str) -> float | None:
    sample = Corpus(0).slice(random.Random(0), _SAMPLE_BYTES)
    async with session.post(f"{url}/tokenize", json={"model": model, "prompt": sample}) as response:
        count = (await _object(response)).get("count")
    return _SAMPLE_BYTES / count if isinstance(count, int) and count > 0 else None


async def _object(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The JSON object of an answer that a target need not have; empty where it has none."""
    if response.status != 200:
        return {}
    try:
        answer = orjson.loads(await response.read())
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}
