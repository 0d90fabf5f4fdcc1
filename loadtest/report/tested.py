"""The tested system of a run: engines with versions and flags, GPUs, load, checks; from its checkpoint. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from loadtest.report.formatting import load_text, number, requested_text
from loadtest.report.schema import Results

CheckpointFields = Mapping[str, Any]  # as checkpoint.json has it; empty where there is none
_MOST_MODELS = 3
_KEPT_OF_CACHE = ("num_gpu_blocks", "block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization")


def what_was_tested(results: Results, checkpoint: CheckpointFields) -> list[tuple[str, str]]:
    """What and how, a row each. Without a checkpoint it is what the target says of itself."""
    plan, environment = results.plan, results.environment
    good = max(1, results.requests.succeeded)
    lengths = f"{number(results.tokens.prompt / good)} prompt tokens a request, " + (
        f"{number(results.tokens.completion / good)} output tokens"
    )
    server = ", ".join(f"{name} {value}" for name, value in environment.server.items()) or "it reports no version"
    return [
        ("server", f"{plan['url']}: {server}"),
        ("model", str(plan["model"])),
        *_servers(checkpoint),
        ("load", load_text(plan)),
        ("requests", f"{requested_text(plan)}; {lengths}"),
        ("GPUs", _gpus(results, checkpoint)),
        *_checks(checkpoint),
        ("client", ", ".join(f"{name} {value}" for name, value in environment.versions.items())),
        ("started", environment.started_at),
    ]


def _servers(checkpoint: CheckpointFields) -> Iterator[tuple[str, str]]:
    """Each engine and gateway: version, model length, cache, and the command that started it, if it ran here."""
    for server in checkpoint.get("servers") or []:
        title = f"{server.get('role', 'server')} {server.get('name') or ''}".strip()
        if wrong := server.get("unreachable") or server.get("refused"):
            yield title, str(wrong)
            continue
        parts = [f"version {server['version']}" if server.get("version") else "", server.get("url", "")]
        models = (server.get("models") or [])[:_MOST_MODELS]
        parts += [f"{card['id']} of {number(card['max_model_len'])} tokens" for card in models if card["max_model_len"]]
        cache = (server.get("cache_config") or [{}])[0]
        parts += [f"{name} {cache[name]}" for name in _KEPT_OF_CACHE if cache.get(name) not in (None, "None")]
        yield title, ", ".join(filter(None, parts))
        if command := (server.get("process") or {}).get("command"):
            yield f"{title}: command", shlex.join(command)


def _gpus(results: Results, checkpoint: CheckpointFields) -> str:
    """Those of the client's machine by the checkpoint, and those that were watched elsewhere."""
    hardware = checkpoint.get("hardware") or {}
    named = Counter(gpu["name"] for gpu in hardware.get("gpus") or [])
    found = [f"{count} x {name}" for name, count in named.items()]
    found += [f"driver {hardware['driver']}"] if found and hardware.get("driver") else []
    watched = [gpu.name for gpu in results.samples.gpus] if results.samples is not None else []
    return ", ".join(found or watched) or "none on the client's machine, and none was watched elsewhere"


def _checks(checkpoint: CheckpointFields) -> Iterator[tuple[str, str]]:
    """How many checks of the servers held, and which did not."""
    checks = checkpoint.get("checks") or []
    if checks:
        counts = Counter(str(check["status"]) for check in checks)
        failed = [str(check["name"]) for check in checks if check["status"] == "failed"]
        yield (
            "checks",
            ", ".join(f"{count} {status}" for status, count in counts.items())
            + (f": {', '.join(failed)} failed" if failed else ""),
        )
