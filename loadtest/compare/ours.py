"""This gateway, as an operator starts it: all defaults, but for where it listens and what its backends are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from gateway import __version__
from loadtest.compare.peer import Peer, Setting

OURS = "gateway"


def ours(config: Path | None = None) -> Peer:
    """The gateway; a configuration file replaces the defaults, but for addresses and backends."""

    def arguments(setting: Setting) -> list[str]:
        file = setting.write(f"{OURS}.yaml", yaml.safe_dump(configuration(setting, config)))
        return ["-m", "gateway", "serve", "-c", file]

    policy = "prefix" if config is None else f"as {config.name} says"
    return Peer(OURS, policy, _this_python, arguments, package=f"vllm-batching-gateway=={__version__}")


def configuration(setting: Setting, config: Path | None = None) -> dict[str, Any]:
    told: dict[str, Any] = {} if config is None else yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    server = {
        **told.get("server", {}),
        "host": "127.0.0.1",
        "port": setting.port,
        "admin": {"host": "127.0.0.1", "port": setting.metrics_port},
        "drain_delay_seconds": 0,
        "drain_timeout_seconds": 1,
    }
    cap = {} if setting.max_num_seqs is None else {"max_in_flight": setting.max_num_seqs}
    return {**told, "server": server, "backends": [{"url": url, **cap} for url in setting.backends]}


def _this_python(peers_dir: Path) -> Path | None:  # noqa: ARG001
    return Path(sys.executable)
