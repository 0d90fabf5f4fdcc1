"""Which proxies are installed, in which version, and how a missing one is had: each in an environment of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from loadtest.compare.peer import Peer
from loadtest.compare.schema import DIRECT, ArmTold

Say = Callable[[str], None]
_NOT_ALONE = "several engines are reached through a proxy only; the added latency is against the engines alone"


class NotInstalled(Exception):
    """Something that cannot be had here; the message says what and why."""


def version(peers_dir: Path, peer: Peer) -> str:
    """The version of an installed proxy; "unknown" when it does not tell."""
    program = peer.find(peers_dir)
    if peer.package:
        name, _, pinned = peer.package.partition("==")
        package = name.partition("[")[0].replace("-", "_")
        found = list((peers_dir / peer.name / "lib").glob(f"python*/site-packages/{package}-*.dist-info"))
        if found:
            return found[0].name.removesuffix(".dist-info").removeprefix(f"{package}-")
        return pinned if program == Path(sys.executable) else "unknown"
    if program is None:
        return "unknown"
    told = subprocess.run([str(program), "-v"], capture_output=True, text=True, check=False)
    match = re.search(r"(\d+\.\d+\.\d+)", told.stderr + told.stdout)
    return match[1] if match else "unknown"


def how(peer: Peer) -> str:
    """What the user does to have it."""
    if peer.debian:
        return f"apt-get install {peer.debian}"
    if peer.source:
        return f"loadtest compare --install {peer.name}=DIR, a checkout of {peer.source}"
    return f"loadtest compare --install {peer.name}"


def told_of(peer: Peer, peers_dir: Path) -> ArmTold:
    """A proxy with its version, or with how to install it."""
    if peer.find(peers_dir) is None:
        return ArmTold(name=peer.name, policy=peer.policy, version="", missing=f"not installed: {how(peer)}")
    return ArmTold(name=peer.name, policy=peer.policy, version=version(peers_dir, peer))


def arms_of(names: Sequence[str], known: dict[str, Peer], peers_dir: Path, engines: int) -> list[ArmTold]:
    """The arms of these names, or all; an engine without a proxy only where there is one engine. Raises ValueError."""
    if unknown := [name for name in names if name not in known and name != DIRECT]:
        raise ValueError(f"no proxy {', '.join(unknown)}; there are {', '.join((DIRECT, *known))}")
    wanted = list(dict.fromkeys(names)) or [DIRECT, *known]
    told = {name: told_of(known[name], peers_dir) for name in wanted if name != DIRECT}
    alone = ArmTold(name=DIRECT, policy="one engine", version="", missing="" if engines == 1 else _NOT_ALONE)
    # With several engines, DIRECT is listed only if it was named.
    listed = [name for name in wanted if name != DIRECT or names or engines == 1]
    return [alone if name == DIRECT else told[name] for name in listed]


def pip_install(peers_dir: Path, peer: Peer, say: Say, what: str = "") -> None:
    """Install a proxy by pip: the version that is pinned, or WHAT, a requirement or a folder. Raises NotInstalled."""
    wanted = what or ("" if peer.source else peer.package)
    if not wanted:
        raise NotInstalled(f"to have {peer.name}: {how(peer)}")
    venv = peers_dir.absolute() / peer.name
    say(f"installing {wanted} into {venv}")
    try:
        if not (venv / "bin" / "python").exists():
            subprocess.run([python_for(peer), "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, wanted], check=True)
    except subprocess.CalledProcessError as error:
        raise NotInstalled(f"{wanted} did not install here (exit {error.returncode})") from error
    if peer.find(peers_dir) is None:
        raise NotInstalled(f"{wanted} brought no program that is {peer.name}")


def python_for(peer: Peer, which: Callable[[str], str | None] = shutil.which) -> str:
    """An interpreter that is new enough: this one, or the oldest such on the PATH. Raises NotInstalled."""
    if sys.version_info[:2] >= peer.python:
        return sys.executable
    major, first = peer.python
    found = (which(f"python{major}.{minor}") for minor in range(first, first + 4))
    path = next((path for path in found if path), None)
    if path is None:
        raise NotInstalled(f"{peer.name} needs Python {major}.{first} or newer: put it on the PATH")
    return path
