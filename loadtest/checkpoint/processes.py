"""Which process of this machine listens at a port, how it was started, and with which packages."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.checkpoint import redaction
from loadtest.checkpoint.document import Process
from loadtest.checkpoint.versions import freeze_of

# What configures serving; the rest of an environment is nobody's business.
_KEPT = (
    "VLLM_", "CUDA_", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_",
    "KMP_", "OPENBLAS_", "GLOO_", "RAY_", "UCX_", "HIP_", "ROCR_", "PYTHON", "LD_PRELOAD", "LD_LIBRARY_PATH", "MALLOC_",
    "GATEWAY_", "SGLANG_", "LMCACHE_",
)  # fmt: skip
_LISTEN = "0A"


class NoProcess(Exception):
    """The process cannot be known; the message says why."""


def process_at(url: str, proc: Path = Path("/proc")) -> Process:
    """The process that serves the URL, with secrets starred out. Raises NoProcess."""
    pid = pid_at(url, proc)
    folder = proc / str(pid)
    try:
        words = words_of(pid, proc)
        directory = os.readlink(folder / "cwd")
        variables = variables_of(pid, proc)
    except OSError as error:
        raise NoProcess(f"process {pid} cannot be read: {error.strerror}") from None
    return Process(
        pid=pid,
        command=redaction.command(words),
        environment=redaction.environment({n: v for n, v in variables.items() if n.startswith(_KEPT)}),
        directory=directory,
        started_at=_started_at(folder, proc),
        freeze=freeze_of(Path(directory), words),
    )


def words_of(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """Its command as it is, for those who need a path of it; not to be shown. Raises OSError."""
    return _split(proc / str(pid) / "cmdline")


def variables_of(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """Its environment as it is; not to be shown. Raises OSError."""
    return dict(word.partition("=")[::2] for word in _split(proc / str(pid) / "environ"))


def pid_at(url: str, proc: Path = Path("/proc")) -> int:
    """The first process that listens there. Raises NoProcess."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not _is_here(parts.hostname or ""):
        raise NoProcess(f"{parts.hostname} is another machine")
    sockets = {inode for listening, inode in _listening(proc) if listening == port}
    if not sockets:
        raise NoProcess(f"nothing of this network namespace listens at port {port}")
    owners = [pid for pid in _pids(proc) if sockets & _sockets_of(proc, pid)]
    if not owners:
        raise NoProcess(f"whose port {port} is, may not be read")
    # Workers inherit the socket of the process that made it.
    return next((pid for pid in owners if _parent(proc, pid) not in owners), min(owners))


def ports_of(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """All TCP ports at which it listens."""
    sockets = _sockets_of(proc, pid)
    return sorted({port for port, inode in _listening(proc) if inode in sockets})


def _is_here(host: str) -> bool:
    """Whether the name is an address of this machine: only then can a socket have it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def _listening(proc: Path) -> Iterator[tuple[int, str]]:
    """(port, inode) of TCP sockets that listen."""
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for cells in map(str.split, lines):
            if len(cells) > 9 and cells[3] == _LISTEN:
                yield int(cells[1].rpartition(":")[2], 16), cells[9]


def _pids(proc: Path) -> list[int]:
    return sorted(int(path.name) for path in proc.iterdir() if path.name.isdecimal())


def _sockets_of(proc: Path, pid: int) -> set[str]:
    found = set()
    try:
        for file in (proc / str(pid) / "fd").iterdir():
            kind, _, inode = _link(file).partition("[")
            if kind == "socket:":
                found.add(inode.rstrip("]"))
    except OSError:
        return found  # it has ended, or is another user's
    return found


def _link(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""


def _parent(proc: Path, pid: int) -> int:
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def _split(file: Path) -> list[str]:
    return [word for word in file.read_bytes().decode("utf-8", "replace").split("\0") if word]


def _started_at(folder: Path, proc: Path) -> str:
    """From the ticks since the machine's start."""
    try:
        ticks = int((folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
        lines = (proc / "stat").read_text(encoding="ascii").splitlines()
    except (OSError, IndexError, ValueError):
        return ""
    booted = next((int(line.split()[1]) for line in lines if line.startswith("btime ")), None)
    if booted is None:
        return ""
    moment = datetime.fromtimestamp(booted + ticks / os.sysconf("SC_CLK_TCK"), UTC)
    return moment.isoformat(timespec="seconds")
