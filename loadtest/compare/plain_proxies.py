"""nginx and HAProxy: they know nothing of prompts, and show what a proxy costs at least."""

from __future__ import annotations

from urllib.parse import urlsplit

from loadtest.compare.peer import Peer, Setting, of_the_system

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


NGINX = Peer("nginx", "least connections", of_the_system("nginx"), _nginx, debian="nginx-light")
HAPROXY = Peer("haproxy", "least connections", of_the_system("haproxy"), _haproxy, debian="haproxy")
