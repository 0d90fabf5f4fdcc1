"""What a server says of itself, and, on this machine, how it was started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import ConfigError
from gateway.config_file import parse, substitute
from loadtest.checkpoint import processes, redaction
from loadtest.checkpoint.asking import Unreachable, get, get_object, get_text, parsed
from loadtest.checkpoint.document import ModelCard, ModelFiles, Role, Server
from loadtest.checkpoint.hashes import model_files

_GATEWAY_PACKAGE = "vllm-batching-gateway"
_CACHE_CONFIG = "vllm:cache_config_info"
_ENGINE_SIGN = "vllm:num_requests_running"


async def look(
    session: aiohttp.ClientSession, name: str, url: str, *, driven: bool, named: bool, admin_url: str = ""
) -> Server:
    """Everything the server tells. Raises nothing: a server that is gone says so in `unreachable`."""
    server = Server(name=name, url=url, role=Role.GATEWAY, driven=driven, named=named, admin_url=admin_url)
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


def _with_process(server: Server) -> Server:
    try:
        process = processes.process_at(server.url)
    except processes.NoProcess as why:
        return server.model_copy(update={"process_unknown": str(why)})
    folders = [Path(process.directory) / card.root for card in server.models if card.root]
    files: list[ModelFiles] = [made for folder in dict.fromkeys(folders) if (made := model_files(folder)) is not None]
    version = server.version
    if server.role is Role.GATEWAY and process.freeze is not None:
        version = version or process.freeze.named.get(_GATEWAY_PACKAGE, "")
    more = {"process": process, "model_files": files if server.role is Role.ENGINE else [], "version": version}
    return server.model_copy(update=more)


async def _with_admin(session: aiohttp.ClientSession, server: Server) -> Server:
    """A gateway's own account of its backends: at another port of its process, else at the URL that was given."""
    update: dict[str, Any] = {}
    if server.process is not None:
        process = server.process
        try:
            words, variables = processes.words_of(process.pid), processes.variables_of(process.pid)
        except OSError:
            return server  # it has ended just now
        update["configuration"] = gateway_configuration(words, Path(process.directory), variables)
    given = [server.admin_url] if server.admin_url else []
    for admin_url in [*_other_ports(server), *given]:
        told = await get_object(session, f"{admin_url}/admin/backends")
        if told is not None and isinstance(told.get("backends"), list):
            update |= {"admin_url": admin_url, "backends": [_lasting(each) for each in told["backends"]]}
            break
    return server.model_copy(update=update)


def _other_ports(server: Server) -> list[str]:
    if server.process is None:
        return []
    own = urlsplit(server.url).port
    return [f"http://127.0.0.1:{port}" for port in processes.ports_of(server.process.pid) if port != own]


def _lasting(backend: Mapping[str, Any]) -> dict[str, Any]:
    """What does not change from moment to moment."""
    kept = ("name", "url", "version", "models", "engines", "limit_upper", "kv_cache_tokens")
    return {name: backend[name] for name in kept if name in backend}
