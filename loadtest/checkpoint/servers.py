"""A server's own reports, and, on this machine, the command of its process.

Engines behind a gateway are named by the user or found by the gateway's admin port.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import ConfigError
from gateway.config.file import parse, substitute
from loadtest.access import Access
from loadtest.checkpoint import redaction
from loadtest.checkpoint.document import ModelCard, ModelFiles, ProcessInfo, Role, ServerInfo
from loadtest.checkpoint.fingerprints import freeze_of, model_files
from loadtest.checkpoint.questions import Unreachable, get, get_object, get_text, open_asker, parsed

# Variables that configure serving; the rest of an environment is not recorded.
_KEPT = (
    "VLLM_ CUDA_ NVIDIA_ NCCL_ TORCH PYTORCH_ HF_ TRANSFORMERS_ TOKENIZERS_ OMP_ MKL_ KMP_ OPENBLAS_ GLOO_ RAY_ UCX_"
    " HIP_ ROCR_ PYTHON LD_PRELOAD LD_LIBRARY_PATH MALLOC_ GATEWAY_ SGLANG_ LMCACHE_"
)
_LISTEN = "0A"


class NoProcess(Exception):
    """The process cannot be known; the message says why."""


def process_at(url: str, proc: Path = Path("/proc")) -> ProcessInfo:
    """The process that serves the URL, with secrets starred out. Raises NoProcess."""
    pid = pid_at(url, proc)
    folder = proc / str(pid)
    kept = tuple(_KEPT.split())
    try:
        words = words_of(pid, proc)
        directory = os.readlink(folder / "cwd")
        variables = {name: value for name, value in variables_of(pid, proc).items() if name.startswith(kept)}
    except OSError as error:
        raise NoProcess(f"process {pid} cannot be read: {error.strerror}") from None
    return ProcessInfo(
        pid=pid,
        command=redaction.command(words),
        environment=redaction.environment(variables),
        directory=directory,
        started_at=_started_at(folder, proc),
        freeze=freeze_of(Path(directory), words),
    )


def words_of(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """Its unredacted command, for callers that need a path of it; not to be shown. Raises OSError."""
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


_GATEWAY_PACKAGE = "vllm-batching-gateway"
_CACHE_CONFIG = "vllm:cache_config_info"
_ENGINE_SIGN = "vllm:num_requests_running"


async def look(
    session: aiohttp.ClientSession, name: str, url: str, *, driven: bool, named: bool, admin_url: str = ""
) -> ServerInfo:
    """Everything the server reports. Raises nothing: a server that is gone says so in `unreachable`."""
    server = ServerInfo(name=name, url=url, role=Role.GATEWAY, driven=driven, named=named, admin_url=admin_url)
    try:
        status, body = await get(session, f"{url}/v1/models")
    except Unreachable as error:
        return server.model_copy(update={"unreachable": str(error)})
    listed = parsed(body) or {} if status == 200 else {}
    refused = "" if status == 200 else f"/v1/models answers {status}"
    page = await get_text(session, f"{url}/metrics")
    is_engine = page is not None and _ENGINE_SIGN in page
    found: dict[str, Any] = {
        "role": Role.ENGINE if is_engine else Role.GATEWAY,
        "refused": refused,
        "version": str((await get_object(session, f"{url}/version") or {}).get("version", "")),
        "models": list(_cards(listed)),
        "cache_config": cache_labels(page or ""),
    }
    if is_engine:
        info = await get_object(session, f"{url}/server_info?config_format=json")
        found["server_info"] = None if info is None else redaction.document(info)
    server = _with_process(server.model_copy(update=found))
    return server if is_engine else await _with_admin(session, server)


def cache_labels(page: str) -> list[dict[str, str]]:
    """The labels of the engines' cache configuration, by rank."""
    lines = [line for line in page.splitlines() if line.startswith(_CACHE_CONFIG)]
    families = text_string_to_metric_families("\n".join(lines) + "\n") if lines else ()
    return [dict(sorted(sample.labels.items())) for family in families for sample in family.samples]


def gateway_configuration(words: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Any:
    """A local gateway's configuration as it reads it, with defaults, without secrets; or a text that says why not."""
    if "serve" not in words:
        return "its command is not `gateway serve`"
    file = next(iter(_values(words, "-c", "--config")), None)
    try:
        document = {} if file is None else yaml.safe_load((directory / file).read_text(encoding="utf-8"))
        document = substitute(document or {}, dict(environment))
        if backends := _values(words, "--backend"):
            document["backends"] = [{"url": url} for url in backends]
        return redaction.document(parse(document).model_dump(mode="json"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError, TypeError) as error:
        return redaction.text(f"{file or 'no file'}: cannot be read as the gateway did: {error}")


def _values(words: Sequence[str], *options: str) -> list[str]:
    found = []
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word in options and place + 1 < len(words):
            found.append(words[place + 1])
        elif equals and name in options:
            found.append(value)
    return found


def _cards(listed: Mapping[str, Any]) -> Iterator[ModelCard]:
    cards = listed.get("data")
    for card in cards if isinstance(cards, list) else ():
        if isinstance(card, dict) and "id" in card:
            length = card.get("max_model_len")
            yield ModelCard(
                id=str(card["id"]),
                root=str(card.get("root") or ""),
                max_model_len=length if isinstance(length, int) else None,
            )


def _with_process(server: ServerInfo) -> ServerInfo:
    try:
        process = process_at(server.url)
    except NoProcess as why:
        return server.model_copy(update={"process_unknown": str(why)})
    folders = [Path(process.directory) / card.root for card in server.models if card.root]
    files: list[ModelFiles] = [made for folder in dict.fromkeys(folders) if (made := model_files(folder)) is not None]
    version = server.version
    if server.role is Role.GATEWAY and process.freeze is not None:
        version = version or process.freeze.named.get(_GATEWAY_PACKAGE, "")
    more = {"process": process, "model_files": files if server.role is Role.ENGINE else [], "version": version}
    return server.model_copy(update=more)


async def _with_admin(session: aiohttp.ClientSession, server: ServerInfo) -> ServerInfo:
    """A gateway's own account of its backends: at another port of its process, else at the URL that was given."""
    update: dict[str, Any] = {}
    if server.process is not None:
        process = server.process
        try:
            words, variables = words_of(process.pid), variables_of(process.pid)
        except OSError:
            return server  # it has ended just now
        update["configuration"] = gateway_configuration(words, Path(process.directory), variables)
    given = [server.admin_url] if server.admin_url else []
    for admin_url in [*_other_ports(server), *given]:
        answer = await get_object(session, f"{admin_url}/admin/backends")
        if answer is not None and isinstance(answer.get("backends"), list):
            update |= {"admin_url": admin_url, "backends": [_lasting(each) for each in answer["backends"]]}
            break
    return server.model_copy(update=update)


def _other_ports(server: ServerInfo) -> list[str]:
    if server.process is None:
        return []
    own = urlsplit(server.url).port
    return [f"http://127.0.0.1:{port}" for port in ports_of(server.process.pid) if port != own]


def _lasting(backend: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are constant over time."""
    kept = ("name", "url", "version", "models", "engines", "limit_upper", "kv_cache_tokens")
    return {name: backend[name] for name in kept if name in backend}


@dataclass(frozen=True, slots=True)
class Neighbours:
    """All servers of a run by name, before it; pages of metrics with the engines' counters."""

    servers: Mapping[str, ServerInfo]
    pages: Mapping[str, str] = field(default_factory=dict)

    def pages_behind(self, driven: str) -> dict[str, str]:
        """Pages of metrics of all engines, and of the admin port of the gateway of that name."""
        others = {name for name, server in self.servers.items() if server.role is not Role.ENGINE and name != driven}
        return {name or "gateway": url for name, url in self.pages.items() if name not in others}

    def around(self, driven: str) -> list[ServerInfo]:
        """The server of that name, and all engines and no other gateway."""
        return [
            server.model_copy(update={"driven": name == driven})
            for name, server in self.servers.items()
            if name == driven or server.role is Role.ENGINE
        ]


async def neighbours(
    targets: Mapping[str, str], engines: Mapping[str, str], admin_url: str | None, access: Access
) -> Neighbours:
    """Queries all targets, and gateways for their backends. An engine has one name, driven or not."""
    found: dict[str, ServerInfo] = {}
    async with open_asker(access) as session:
        for name, url in targets.items():
            found[name] = await look(session, name, url, driven=True, named=True, admin_url=admin_url or "")
        for name, url in engines.items():
            if not _known(found, url):
                found[name] = await look(session, name, url, driven=False, named=True)
        for gateway in [server for server in found.values() if server.backends]:
            for backend in gateway.backends:
                url = str(backend.get("url") or f"http://{backend['name']}")
                if not _known(found, url):
                    name = str(backend["name"])
                    found[name] = await look(session, name, url, driven=False, named=False)
        pages = {name: f"{server.url}/metrics" for name, server in found.items() if server.role is Role.ENGINE}
        for name, server in found.items():
            page = f"{server.admin_url}/metrics"
            if server.admin_url and server.role is Role.GATEWAY and await get_text(session, page) is not None:
                pages[name] = page
    return Neighbours(found, pages)


def _known(found: Mapping[str, ServerInfo], url: str) -> bool:
    return any(server.url == url.rstrip("/") for server in found.values())
