"""The proxies that are compared: how each is started so that it does what the others do."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Template

from tests.bench.place import SOURCES, Place, Ports

OURS = "gateway"

_NGINX = Template("""\
worker_processes 1; daemon off; pid $root/nginx.pid; error_log stderr warn; worker_rlimit_nofile 16384;
events { worker_connections 8192; }
http {
  access_log off; tcp_nodelay on;
  keepalive_timeout 300s; keepalive_requests 1000000000;
  client_max_body_size 64m; client_body_buffer_size 1m;
  client_body_temp_path $root/nginx; proxy_temp_path $root/nginx;
  fastcgi_temp_path $root/nginx; uwsgi_temp_path $root/nginx; scgi_temp_path $root/nginx;
  upstream engines {
    server 127.0.0.1:$engine_1; server 127.0.0.1:$engine_2;
    keepalive 1024; keepalive_requests 1000000000;
  }
  server {
    listen 127.0.0.1:$proxy backlog=4096;
    location / {
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 300s;
    }
  }
}
""")
_HAPROXY = Template("""\
global
  maxconn 8000
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 300s
  timeout server 300s
  option http-no-delay
  http-reuse always
listen engines
  bind 127.0.0.1:$proxy backlog 4096
  balance roundrobin
  server engine_1 127.0.0.1:$engine_1
  server engine_2 127.0.0.1:$engine_2
""")


def _no_environment(ports: Ports) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Peer:
    """One proxy."""

    name: str
    policy: str
    program: Callable[[Place], Path | None]
    """Where it is installed, or None."""
    arguments: Callable[[Place, Ports], list[str]]
    package: str = ""
    """Of the Python package index, with the version that is compared."""
    debian: str = ""
    environment: Callable[[Ports], dict[str, str]] = _no_environment

    @property
    def is_router(self) -> bool:
        """Whether it routes by prefix as ours does, so that ours is held against it."""
        return bool(self.package)

    def command(self, place: Place, ports: Ports) -> list[str]:
        """What starts it in the foreground. Writes its configuration file, if it has one."""
        program = self.program(place)
        if program is None:
            raise FileNotFoundError(f"{self.name} is not installed")
        return [str(program), *self.arguments(place, ports)]


def _in_venv(name: str, program: str) -> Callable[[Place], Path | None]:
    def find(place: Place) -> Path | None:
        path = place.peer(name) / "bin" / program
        return path if path.exists() else None

    return find


def _on_path(program: str) -> Callable[[Place], Path | None]:
    def find(place: Place) -> Path | None:
        found = shutil.which(program, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        return Path(found) if found else None

    return find


def _beside_python(place: Place) -> Path | None:
    path = Path(sys.executable).with_name("gateway")
    return path if path.exists() else None


def _render(template: Template, place: Place, ports: Ports, name: str) -> str:
    root = place.root.resolve()
    (root / "nginx").mkdir(parents=True, exist_ok=True)
    values = {"root": root, "proxy": ports.proxy, "engine_1": ports.engines[0], "engine_2": ports.engines[1]}
    path = root / name
    path.write_text(template.substitute(values))
    return str(path)


def _nginx(place: Place, ports: Ports) -> list[str]:
    return ["-p", str(place.root.resolve()), "-c", _render(_NGINX, place, ports, "nginx.conf")]


def _haproxy(place: Place, ports: Ports) -> list[str]:
    return ["-db", "-f", _render(_HAPROXY, place, ports, "haproxy.cfg")]


def _router(place: Place, ports: Ports) -> list[str]:
    """What the three routers, relatives of one another, have in common; their caps are lifted above the load."""
    address = ["--host", "127.0.0.1", "--port", str(ports.proxy), "--worker-urls", *ports.backends]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports.metrics)]
    return [*address, "--policy", "cache_aware", *metrics, "--max-concurrent-requests", "4096"]


def _sglang_router(place: Place, ports: Ports) -> list[str]:
    return ["-m", "sglang_router.launch_router", *_router(place, ports), "--log-level", "warn"]


def _vllm_router(place: Place, ports: Ports) -> list[str]:
    """It asks both engines to render every prompt, which the mock does; refused, it is slower or places by chance."""
    return [*_router(place, ports), "--log-level", "warning"]


def _smg(place: Place, ports: Ports) -> list[str]:
    """It would fetch a tokenizer for the model; its HTTP backends need none."""
    model = ["--backend", "vllm", "--model-path", "mock", "--disable-tokenizer-autoload"]
    return ["launch", *_router(place, ports), *model, "--log-level", "warn"]


def ours(config: Path) -> Peer:
    """Our gateway with this configuration."""

    def arguments(place: Place, ports: Ports) -> list[str]:
        return ["serve", "-c", str(config)]

    return Peer(OURS, "prefix", _beside_python, arguments, environment=_gateway_environment)


def _gateway_environment(ports: Ports) -> dict[str, str]:
    return {
        "BENCH_PORT": str(ports.proxy),
        "BENCH_METRICS_PORT": str(ports.metrics),
        "BENCH_ENGINE_1_PORT": str(ports.engines[0]),
        "BENCH_ENGINE_2_PORT": str(ports.engines[1]),
    }


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in [
        ours(SOURCES / "gateway.yaml"),
        Peer("nginx", "round robin", _on_path("nginx"), _nginx, debian="nginx-light"),
        Peer("haproxy", "round robin", _on_path("haproxy"), _haproxy, debian="haproxy"),
        Peer(
            "sglang-router",
            "cache-aware",
            _in_venv("sglang-router", "python"),
            _sglang_router,
            package="sglang-router==0.3.2",
        ),
        Peer(
            "vllm-router",
            "cache-aware",
            _in_venv("vllm-router", "vllm-router"),
            _vllm_router,
            package="vllm-router==0.1.17",
        ),
        Peer("smg", "cache-aware", _in_venv("smg", "smg"), _smg, package="smg==1.13.0"),
    ]
}


def named(names: list[str]) -> list[Peer]:
    """The proxies of these names, or all."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"no proxy {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return [PEERS[name] for name in names] if names else list(PEERS.values())
