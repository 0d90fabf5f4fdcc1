"""The load of a prediction: some to calibrate by, then a minute that is judged."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.servers.engines import Kind

_SEED = 7


class LoadFailed(Exception):
    """A load brought no results; the message says which."""


@dataclass(frozen=True)
class Load:
    """Sessions under shared prefixes, open loop. Lengths are in tokens."""

    sessions_per_second: float
    seconds: float
    prefix_tokens: int
    tail_tokens: int
    max_tokens: int
    calibration_seconds: float
    calibration_users: int
    kv_tokens: int
    think_seconds: float = 1.0


def usual(kind: Kind) -> Load:
    """As much as two engines of that kind can: a small model on the CPU is slow."""
    if kind is Kind.SIM:
        return Load(4.0, 60.0, 1024, 256, 64, 10.0, 8, 131_072)
    return Load(0.25, 60.0, 256, 64, 24, 25.0, 6, 32_768)


def drive(url: str, pages: Sequence[str], load: Load, out: Path, say: Callable[[str], None]) -> Path:
    """Calibrate, then drive the load; returns its results.json. Raises LoadFailed."""
    sizes = [
        "--prefix-tokens",
        str(load.prefix_tokens),
        "--tail-tokens",
        str(load.tail_tokens),
        "--max-tokens",
        str(load.max_tokens),
        "--seed",
        str(_SEED),
        "--groups",
        "4",
    ]
    say("one request at a time, to see what an idle engine takes")
    _run(url, ["-w", "shared-prefix", "-c", "1", "-n", "16", "--warmup", "4", *sizes], out / "idle")
    say(f"{load.calibration_users} users for {load.calibration_seconds:g} s, to see what a busy one takes")
    crowd = ["-w", "unique", "-c", str(load.calibration_users), "-d", f"{load.calibration_seconds:g}", *sizes]
    _run(url, crowd, out / "busy")
    say(f"{load.sessions_per_second:g} sessions/s for {load.seconds:g} s, which is what is predicted")
    named = ",".join(f"engine-{number}={page}/metrics" for number, page in enumerate(pages))
    sessions = [
        "-w",
        "sessions",
        "-r",
        str(load.sessions_per_second),
        "-d",
        f"{load.seconds:g}",
        "--turns",
        "2:5",
        "--think",
        str(load.think_seconds),
        "--warmup",
        "0",
        "--metrics-url",
        named,
        *sizes,
    ]
    _run(url, sessions, out / "judged")
    return out / "judged" / "results.json"


def _run(url: str, flags: list[str], out: Path) -> None:
    """Its exit code is no matter: whether the client kept up is in its results, and what failed shows in the log."""
    results = out / "results.json"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "loadtest", "run", url, *flags, "--no-verify", "--out", str(out)]
    inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    ended = subprocess.run(command, check=False, capture_output=True, env=inherited, stdin=subprocess.DEVNULL)
    if not results.exists():
        raise LoadFailed(f"{' '.join(command)}: {ended.stderr.decode(errors='replace').strip()[-500:]}")
