"""How the servers of a sweep are started."""

from __future__ import annotations

import sys

from loadtest.servers.server import HOST, Launch
from loadtest.sweep.plan import SweepPlan
from loadtest.sweep.space import Configuration, spelled
from loadtest.vllm_cpu.process import STOP_GRACE_SECONDS as _STOP_SECONDS
from loadtest.vllm_cpu.process import VllmOptions, command_line, environment

_GATEWAY_READY_SECONDS = 30.0


def engine(plan: SweepPlan, configuration: Configuration, port: int) -> Launch:
    serve, arguments, url = plan.serve, configuration.arguments(), f"http://{HOST}:{port}"
    if serve.vllm_cpu is not None:
        own = serve.vllm_cpu
        options = VllmOptions(
            own.model,
            venv_dir=own.venv,
            port=port,
            kv_events=False,
            kv_cache_gib=own.kv_cache_gib,
            flags=tuple(arguments),
            environment=serve.env,
        )
        return Launch(
            command_line(options),
            url,
            "/health",
            ready_seconds=serve.ready_seconds,
            environment=environment(options),
            stop_seconds=_STOP_SECONDS,
        )
    if serve.simulated is not None:
        fixed = [word for flag, value in serve.simulated.items() for word in spelled(flag, value)]
        command = [sys.executable, "-m", "loadtest", "sim", "--port", str(port), *fixed, *arguments]
    else:
        given = serve.command or []
        command = [word.replace("{port}", str(port)) for word in given] + arguments
        if command == given + arguments:
            command += ["--host", HOST, "--port", str(port)]
    return Launch(
        command, url, "/health", ready_seconds=serve.ready_seconds, environment=serve.env, stop_seconds=_STOP_SECONDS
    )


def command_text(plan: SweepPlan, configuration: Configuration) -> list[str]:
    """How people start the server of a configuration."""
    serve = plan.serve
    if serve.vllm_cpu is not None:
        first = ["vllm", "serve", str(serve.vllm_cpu.model)]
    elif serve.simulated is not None:
        fixed = [word for flag, value in serve.simulated.items() for word in spelled(flag, value)]
        first = ["loadtest", "sim", "--port", "8000", *fixed]
    else:
        first = [word.replace("{port}", "8000") for word in serve.command or []]
    return first + configuration.arguments()


def gateway(plan: SweepPlan, backend_url: str, port: int) -> Launch:
    command = [sys.executable, "-m", "gateway", "serve", "--backend", backend_url, "--host", HOST, "--port", str(port)]
    command += ["--admin-port", "0"]
    if plan.gateway_config is not None:
        command += ["--config", str(plan.gateway_config)]
    return Launch(
        command, f"http://{HOST}:{port}", "/readyz", ready_seconds=_GATEWAY_READY_SECONDS, stop_seconds=_STOP_SECONDS
    )
