"""LiteLLM's proxy: it knows no prefixes; its best policy for equal engines is the least busy one."""

from __future__ import annotations

import yaml

from loadtest.compare.peer import Peer, Setting, in_venv_or_on_path


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
    "least busy",
    in_venv_or_on_path("litellm", "litellm"),
    _litellm,
    package="litellm[proxy]==1.106.2",
    environment=_environment,
)
