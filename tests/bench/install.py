"""Builds the C tools and installs the peers, each apart from the others; what is there already is left alone."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from loadtest.compare.peers import OURS, NotInstalled, Say, pip_install, version
from loadtest.compare.proxy import Peer
from tests.bench.bodies import write_bodies
from tests.bench.build import Interpreter, install_gateway
from tests.bench.place import SOURCES, Place

_C = SOURCES / "c"
_SHARED = ["bytes.c", "message.c"]
_PROGRAMS = {
    "engine": ["engine.c", "answers.c", "stats.c", "alarms.c", *_SHARED],
    "load": ["load.c", "options.c", "tally.c", "samples.c", *_SHARED],
}


def find_compiler() -> str | None:
    """A C compiler, if there is one."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def build_tools(place: Place) -> None:
    """Compile what is older than its sources. Raises NotInstalled without a C compiler."""
    newest = max(path.stat().st_mtime for path in _C.iterdir())
    (place.root / "bin").mkdir(parents=True, exist_ok=True)
    for name, sources in _PROGRAMS.items():
        program = place.root / "bin" / name
        if program.exists() and program.stat().st_mtime > newest:
            continue
        compiler = find_compiler()
        if compiler is None:
            raise NotInstalled("the benchmark's engine and load generator are in C: install a compiler (cc)")
        partial = program.with_suffix(".partial")
        command = [compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", str(partial)]
        subprocess.run([*command, *(str(_C / source) for source in sources)], check=True)
        partial.rename(program)


def build_counter(place: Place) -> Path:
    """Compile the switch of `instructions`. Raises NotInstalled without valgrind or a C compiler."""
    compiler = find_compiler()
    if compiler is None or shutil.which("valgrind") is None:
        raise NotInstalled(
            "counting instructions needs valgrind and a C compiler: apt-get install valgrind gcc libc6-dev"
        )
    place.root.mkdir(parents=True, exist_ok=True)
    library = place.root / "counting.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_C / "counting.c")], check=True)
    return library


def _apt_install(peer: Peer) -> None:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise NotInstalled(f"it is not there, and installing {peer.debian} needs apt-get and root")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", peer.debian]):
        done = subprocess.run(["apt-get", *command], env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise NotInstalled(f"apt-get install {peer.debian} failed (exit {done.returncode})")


def install_peer(place: Place, peer: Peer, say: Say, python: Interpreter | None) -> None:
    """Install one peer unless its version is there. Raises NotInstalled."""
    if peer.name == OURS:
        if python is not None:
            install_gateway(place, python, say)
        return
    if peer.package:
        wanted = peer.package.partition("==")[2]
        if peer.find(place.peers) is None or version(place.peers, peer) != wanted:
            pip_install(place.peers, peer, say)
    elif peer.find(place.peers) is None:
        say(f"installing {peer.debian} from Debian")
        _apt_install(peer)


def install(place: Place, peers: Iterable[Peer], say: Say, python: Interpreter | None = None) -> list[Peer]:
    """Make everything ready; says which peers are skipped, and why, and returns the others.

    The gateway is installed for PYTHON; None: it runs from this checkout.
    """
    build_tools(place)
    write_bodies(place)
    ready: list[Peer] = []
    for peer in peers:
        try:
            install_peer(place, peer, say, python)
        except NotInstalled as error:
            say(f"skipping {peer.name}: {error}")
        else:
            ready.append(peer)
    return ready
