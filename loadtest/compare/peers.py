"""All proxies that can be compared, in the order of the tables, and how to install them.

- This gateway, with all defaults but the port and the backends.
- LiteLLM's proxy: knows no prefixes; its best policy for equal engines is the least busy one.
- nginx and HAProxy: know nothing of prompts; they show the minimum cost of a proxy.
- Routers that know prefixes, each with its cache-aware policy, its own thresholds, and a cap above the load.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from gateway import __version__
from loadtest.compare.proxy import Peer, Setting, in_venv, in_venv_or_on_path, of_the_system
from loadtest.compare.schema import DIRECT, ArmInfo
from loadtest.servers.server import gateway_configuration

OURS = "gateway"


def ours(config: Path | None = None) -> Peer:
    """The gateway; a configuration file replaces the defaults, but for addresses and backends."""

    def arguments(setting: Setting) -> list[str]:
        file = setting.write(f"{OURS}.yaml", yaml.safe_dump(configuration(setting, config)))
        return ["-m", "gateway", "serve", "-c", file]

    policy = "prefix" if config is None else f"as {config.name} says"
    return Peer(
        OURS, policy=policy, find=_this_python, arguments=arguments, package=f"vllm-batching-gateway=={__version__}"
    )


def configuration(setting: Setting, config: Path | None = None) -> dict[str, Any]:
    info: dict[str, Any] = {} if config is None else yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    cap = {} if setting.max_num_seqs is None else {"max_in_flight": setting.max_num_seqs}
    server = {**info.get("server", {}), "drain_delay_seconds": 0, "drain_timeout_seconds": 1}
    sections = {**info, "server": server, "backends": [{"url": url, **cap} for url in setting.backends]}
    return gateway_configuration(sections, setting.port, setting.metrics_port)


def _this_python(peers_dir: Path) -> Path | None:  # noqa: ARG001
    return Path(sys.executable)


def _litellm(setting: Setting) -> list[str]:
    deployments = [
        {
            "model_name": setting.model,
            "litellm_params": {"model": f"hosted_vllm/{setting.model}", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for url in setting.backends
    ]
    config = {
        "model_list": deployments,
        "router_settings": {"routing_strategy": "least-busy"},
        # It listens on 127.0.0.1, for as long as it is measured, and would not start without.
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        "litellm_settings": {"telemetry": False, "drop_params": False, "request_timeout": 600},
    }
    file = setting.write("litellm.yaml", yaml.safe_dump(config))
    return ["--config", file, "--host", "127.0.0.1", "--port", str(setting.port), "--telemetry", "False"]


def _environment(setting: Setting) -> dict[str, str]:  # noqa: ARG001
    """It fetches nothing, and says little."""
    return {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}


LITELLM = Peer(
    "litellm",
    policy="least busy",
    find=in_venv_or_on_path("litellm", "litellm"),
    arguments=_litellm,
    package="litellm[proxy]==1.106.2",
    environment=_environment,
)


_NGINX = """\
worker_processes 1; daemon off; pid {root}/nginx.pid; error_log stderr warn; worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{
  access_log off; tcp_nodelay on;
  keepalive_timeout 300s; keepalive_requests 1000000000;
  client_max_body_size 64m; client_body_buffer_size 1m;
  client_body_temp_path {root}/nginx; proxy_temp_path {root}/nginx;
  fastcgi_temp_path {root}/nginx; uwsgi_temp_path {root}/nginx; scgi_temp_path {root}/nginx;
  upstream engines {{
    least_conn;
    {servers}
    keepalive 1024; keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 300s;
    }}
  }}
}}
"""
_HAPROXY = """\
global
  maxconn 8000
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 300s
  timeout server 300s
  option http-no-delay
  option redispatch
  default-server check inter 2s
  http-reuse always
listen engines
  bind 127.0.0.1:{port} backlog 4096
  balance leastconn
  option httpchk GET /health
  {servers}
"""


def _nginx(setting: Setting) -> list[str]:
    (setting.folder / "nginx").mkdir(exist_ok=True)
    servers = " ".join(f"server {urlsplit(url).netloc};" for url in setting.backends)
    root = setting.folder.resolve()
    text = _NGINX.format(root=root, servers=servers, port=setting.port)
    return ["-p", str(root), "-c", setting.write("nginx.conf", text)]


def _haproxy(setting: Setting) -> list[str]:
    servers = [f"server engine_{number} {urlsplit(url).netloc}" for number, url in enumerate(setting.backends, 1)]
    text = _HAPROXY.format(servers="\n  ".join(servers), port=setting.port)
    return ["-db", "-f", setting.write("haproxy.cfg", text)]


NGINX = Peer("nginx", policy="least connections", find=of_the_system("nginx"), arguments=_nginx, debian="nginx-light")
HAPROXY = Peer(
    "haproxy", policy="least connections", find=of_the_system("haproxy"), arguments=_haproxy, debian="haproxy"
)


_CAP = "4096"


def _relatives(setting: Setting) -> list[str]:
    """What the three in Rust, relatives of one another, have in common."""
    address = ["--host", "127.0.0.1", "--port", str(setting.port), "--worker-urls", *setting.backends]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(setting.metrics_port)]
    return [*address, "--policy", "cache_aware", *metrics, "--max-concurrent-requests", _CAP]


def _sglang_router(setting: Setting) -> list[str]:
    return ["-m", "sglang_router.launch_router", *_relatives(setting), "--log-level", "warn"]


def _vllm_router(setting: Setting) -> list[str]:
    """It asks all backends to render every prompt; refused, it is slower or places by chance."""
    return [*_relatives(setting), "--log-level", "warning"]


def _smg(setting: Setting) -> list[str]:
    """It would fetch a tokenizer for the model; its HTTP backends need none."""
    model = ["--backend", "vllm", "--model-path", setting.model, "--disable-tokenizer-autoload"]
    return ["launch", *_relatives(setting), *model, "--log-level", "warn"]


def _production_stack(setting: Setting) -> list[str]:
    address = ["--host", "127.0.0.1", "--port", str(setting.port)]
    backends = ["--service-discovery", "static", "--static-backends", ",".join(setting.backends)]
    models = ["--static-models", ",".join([setting.model] * len(setting.backends))]
    return [*address, *backends, *models, "--routing-logic", "prefixaware", "--log-level", "warning"]


SGLANG_ROUTER = Peer(
    "sglang-router",
    policy="cache-aware",
    find=in_venv("sglang-router", "python"),
    arguments=_sglang_router,
    package="sglang-router==0.3.2",
    routes_by_prefix=True,
)
VLLM_ROUTER = Peer(
    "vllm-router",
    policy="cache-aware",
    find=in_venv("vllm-router", "vllm-router"),
    arguments=_vllm_router,
    package="vllm-router==0.1.17",
    routes_by_prefix=True,
)
SMG = Peer(
    "smg",
    policy="cache-aware",
    find=in_venv_or_on_path("smg", "smg"),
    arguments=_smg,
    package="smg==1.13.0",
    routes_by_prefix=True,
)
PRODUCTION_STACK = Peer(
    "production-stack",
    policy="prefix-aware",
    # Its package is called vllm-router, too, so that only a folder of its own separates the two.
    find=in_venv("production-stack", "vllm-router"),
    arguments=_production_stack,
    package="vllm-router",
    source="vllm-project/production-stack",
    python=(3, 12),
    routes_by_prefix=True,
)


PEERS_DIR = Path(".bench/peers")
PEERS: dict[str, Peer] = {
    peer.name: peer for peer in (ours(), SGLANG_ROUTER, VLLM_ROUTER, SMG, PRODUCTION_STACK, LITELLM, NGINX, HAPROXY)
}


def named(names: Sequence[str], known: dict[str, Peer] = PEERS) -> list[Peer]:
    """The proxies of these names, or all. Raises ValueError."""
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no proxy {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


Say = Callable[[str], None]
_NOT_ALONE = "several engines are reached through a proxy only; the added latency is against the engines alone"


class NotInstalled(Exception):
    """Something that cannot be had here; the message says what and why."""


def version(peers_dir: Path, peer: Peer) -> str:
    """The version of an installed proxy; "unknown" when it does not report one."""
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
    info = subprocess.run([str(program), "-v"], capture_output=True, text=True, check=False)
    match = re.search(r"(\d+\.\d+\.\d+)", info.stderr + info.stdout)
    return match[1] if match else "unknown"


def how(peer: Peer) -> str:
    """What the user does to have it."""
    if peer.debian:
        return f"apt-get install {peer.debian}"
    if peer.source:
        return f"loadtest compare --install {peer.name}=DIR, a checkout of {peer.source}"
    return f"loadtest compare --install {peer.name}"


def arm_info(peer: Peer, peers_dir: Path) -> ArmInfo:
    """A proxy with its version, or with how to install it."""
    if peer.find(peers_dir) is None:
        return ArmInfo(name=peer.name, policy=peer.policy, version="", missing=f"not installed: {how(peer)}")
    return ArmInfo(name=peer.name, policy=peer.policy, version=version(peers_dir, peer))


def arms_of(names: Sequence[str], known: dict[str, Peer], peers_dir: Path, engines: int) -> list[ArmInfo]:
    """The arms of these names, or all; an engine without a proxy only where there is one engine. Raises ValueError."""
    if unknown := [name for name in names if name not in known and name != DIRECT]:
        saved = "; saved runs and series are compared by `loadtest report`" if any(map(_is_folder, unknown)) else ""
        raise ValueError(f"no proxy {', '.join(unknown)}; there are {', '.join((DIRECT, *known))}{saved}")
    wanted = list(dict.fromkeys(names)) or [DIRECT, *known]
    info = {name: arm_info(known[name], peers_dir) for name in wanted if name != DIRECT}
    alone = ArmInfo(name=DIRECT, policy="one engine", version="", missing="" if engines == 1 else _NOT_ALONE)
    # With several engines, DIRECT is listed only if it was named.
    listed = [name for name in wanted if name != DIRECT or names or engines == 1]
    return [alone if name == DIRECT else info[name] for name in listed]


def _is_folder(name: str) -> bool:
    return Path(name).is_dir()


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
