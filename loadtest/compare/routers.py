"""Routers that know prefixes, each by its cache-aware policy, its own thresholds, and a cap above the load."""

from __future__ import annotations

from loadtest.compare.peer import Peer, Setting, in_venv, in_venv_or_on_path

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
    "cache-aware",
    in_venv("sglang-router", "python"),
    _sglang_router,
    package="sglang-router==0.3.2",
    routes_by_prefix=True,
)
VLLM_ROUTER = Peer(
    "vllm-router",
    "cache-aware",
    in_venv("vllm-router", "vllm-router"),
    _vllm_router,
    package="vllm-router==0.1.17",
    routes_by_prefix=True,
)
SMG = Peer(
    "smg",
    "cache-aware",
    in_venv_or_on_path("smg", "smg"),
    _smg,
    package="smg==1.13.0",
    routes_by_prefix=True,
)
PRODUCTION_STACK = Peer(
    "production-stack",
    "prefix-aware",
    # Its package is called vllm-router, too, so that only a folder of its own tells the two apart.
    in_venv("production-stack", "vllm-router"),
    _production_stack,
    package="vllm-router",
    source="vllm-project/production-stack",
    python=(3, 12),
    routes_by_prefix=True,
)
