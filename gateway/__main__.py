"""The command `gateway`. Heavy modules are imported by the commands that need them, so that --help is quick."""

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn
from urllib.parse import quote

import typer
from typer import Argument, Option

from gateway import BUILD, __version__
from gateway.cli import usage_command
from gateway.cli.batch import commands as batch_commands
from gateway.cli.key_commands import key_commands
from gateway.cli.serving import is_open_to_all, why_not_serving
from gateway.cli.terminal import (
    ADMIN,
    ADMIN_URL,
    FAILED,
    INVALID,
    AdminUrl,
    ConfigFile,
    ask_gateway,
    fail,
    print_json,
    show,
)
from gateway.workers import WORKER

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.config import Config

_BACKEND = "URL of a vLLM server, such as http://10.0.0.11:8000; repeat for each backend."
BackendUrls = Annotated[list[str] | None, Option("--backend", help=_BACKEND, metavar="URL")]
_API_KEY = "API key of clients, or name=key; repeatable. Other users see it in `ps`: GATEWAY_API_KEYS hides it."
ApiKeys = Annotated[list[str] | None, Option("--api-key", help=_API_KEY, metavar="KEY")]
Host = Annotated[str | None, Option(help="Address to listen on; overrides server.host.")]
_PORT = "Port to listen on; 0 = any free port; overrides server.port."
_RESTART_SECONDS = 150.0
BackendName = Annotated[str, Argument(help="Name of the backend, as `gateway backends` shows it.")]
Wait = Annotated[bool, Option("--wait", help="Return when its last request has ended.")]
Port = Annotated[int | None, Option(min=0, max=65535, help=_PORT)]
_ADMIN_PORT = "Port of /metrics and /admin/*; 0 = any free port; overrides server.admin.port."
AdminPort = Annotated[int | None, Option(min=0, max=65535, help=_ADMIN_PORT)]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None, Option(help="Lowest level logged; overrides log.level.")
]
_FORMAT = "Form of log lines: JSON, or for people; auto = for people on a terminal; overrides log.format."
LogFormat = Annotated[Literal["auto", "json", "console"] | None, Option(help=_FORMAT)]
Packing = Annotated[
    Literal["auto", "none", "fp8", "int8", "int4"], Option(help="Quantization of the weights; auto = from config.json.")
]
NoAdmin = Annotated[bool, Option("--no-admin", help="Disable the admin port (/metrics and /admin/*).")]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="An OpenAI-compatible gateway in front of vLLM servers.",
    epilog="Exit codes: 0 = success, 1 = failure, 2 = invalid usage or configuration.",
)
config_commands = typer.Typer(no_args_is_help=True, help="Inspect the configuration.")
app.add_typer(config_commands, name="config")
backend_commands = typer.Typer(help="Show and change the backends of a running gateway.")
app.add_typer(backend_commands, name="backends")
app.add_typer(key_commands, name="keys")
usage_command.add_to(app)
app.add_typer(batch_commands, name="batch")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-batching-gateway {__version__} ({BUILD}, Python {sys.version.split()[0]})")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the versions and the build.")
    ] = False,
) -> None: ...


@app.command()
def serve(
    file: ConfigFile = None,
    backend: BackendUrls = None,
    host: Host = None,
    port: Port = None,
    admin_port: AdminPort = None,
    no_admin: NoAdmin = False,
    api_key: ApiKeys = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C. With --backend, no configuration file is needed."""
    read = _with_keys_file(_reader(file, backend, host, port, admin_port, no_admin, api_key, log_level, log_format))
    config = _load(read)
    is_worker = WORKER in os.environ
    if is_open_to_all(config) and not is_worker:
        with suppress(OSError):  # a terminal that is gone keeps nothing from being served
            typer.echo(
                f"gateway: warning: auth.keys is empty and server.host is {config.server.host}: "
                "any client that can reach this port can use the models",
                err=True,
            )
    if config.server.workers > 1 and not is_worker:
        _serve_by_workers(config)
    from gateway import process
    from gateway.config import ConfigError
    from gateway.handover.conversation import TakeoverRefused

    try:
        process.serve(config, read, file)
    except ConfigError as error:
        fail(str(error), INVALID)
    except TakeoverRefused as error:
        fail(f"cannot take over: {error}", FAILED)
    except OSError as error:
        fail(why_not_serving(error, config), FAILED)


def _serve_by_workers(config: "Config") -> NoReturn:
    """Start workers, without the modules that serve: those are for the workers."""
    from gateway.workers import parent

    try:
        sys.exit(parent.serve(config))
    except OSError as error:
        fail(why_not_serving(error, config), FAILED)


@app.command()
def check(
    file: ConfigFile = None,
    backend: BackendUrls = None,
    json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
    strict: Annotated[
        bool, Option("--strict", help="Exit with 1 if any backend is unreachable or has a warning.")
    ] = False,
) -> None:
    """Validate the configuration, query every backend once, and show what was found and what to fix.

    Exits with 1 if no backend can be used; with --strict, if any backend is unreachable or has a warning.
    """
    config = _load(_with_keys_file(_reader(file, backend)))
    import asyncio

    from gateway.cli.check import examine

    document = asyncio.run(examine(config))
    show(document, json, "check.jinja")
    backends = document["backends"]
    if not any(each["is_engine"] for each in backends):
        reachable = any(each["reachable"] for each in backends)
        fail("no backend can be used" if reachable else "no backend is reachable", FAILED)
    if strict and (faulty := [each["name"] for each in backends if each["warnings"] or not each["reachable"]]):
        fail(f"failed checks: {', '.join(faulty)}", FAILED)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Start engines and a gateway, and print an example request. Ctrl-C stops all of them."""
    import importlib.util

    if importlib.util.find_spec("loadtest") is None:
        fail(
            "the package loadtest, which runs the engines, is not installed: `pip install vllm-batching-gateway` brings"
            " it, or run `make demo` in a checkout of the project",
            FAILED,
        )
    os.execv(sys.executable, [sys.executable, "-m", "loadtest.servers.demo", *context.args])


@app.command()
def prefixes(
    url: Annotated[str, Argument(help=ADMIN)] = ADMIN_URL,
    minutes: Annotated[float, Option(min=0, help="Length of the time window in minutes; 0 = all recorded data.")] = 0.0,
    json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the KV cache hit rate of prompts and the causes of cache misses."""
    report = ask_gateway(url, f"/admin/prefixes?minutes={minutes:g}")
    from jinja2 import TemplateError

    try:
        show(report, json, "prefixes.jinja")
    except (TemplateError, TypeError, ValueError) as error:
        fail(f"{url}: unsupported report format; use the version of the gateway ({error!r})", FAILED)


@app.command()
def top(
    url: Annotated[str, Argument(help=ADMIN)] = ADMIN_URL,
    once: Annotated[bool, Option("--once", help="Print one page and return.")] = False,
) -> None:
    """Show the fleet, the queue and the last requests, live. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from gateway.cli.client import AskError, followed
    from gateway.cli.top import Top

    shown, console = Top(), Console()
    events = followed(url, "/admin/dashboard/stream", os.environ.get("GATEWAY_ADMIN_TOKEN", ""))
    try:
        with suppress(KeyboardInterrupt), Live(console=console, screen=not once, auto_refresh=False) as live:
            for kind, document in events:
                shown.take(kind, document)
                live.update(shown.screen(console.height), refresh=True)
                if once and kind == "tick":
                    return
            else:
                fail(f"{url} ended the stream", FAILED)
    except AskError as error:
        fail(str(error), FAILED)


@backend_commands.callback(invoke_without_command=True)
def backends(
    context: typer.Context,
    admin: AdminUrl = ADMIN_URL,
    json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the backends of a running gateway: where they come from, their state and why, and their load."""
    context.obj = admin
    if context.invoked_subcommand is None:
        show(ask_gateway(admin, "/admin/backends"), json, "backends.jinja")


@backend_commands.command("list")
def backends_list(
    context: typer.Context, json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False
) -> None:
    """The same as `gateway backends` alone."""
    show(ask_gateway(context.obj, "/admin/backends"), json, "backends.jinja")


@backend_commands.command("add")
def backends_add(
    context: typer.Context,
    url: Annotated[str, Argument(help="URL of a vLLM server, such as http://10.0.0.11:8000.")],
    name: Annotated[str, Option(help="Name in metrics and logs; empty = host:port of the URL.")] = "",
    api_key: Annotated[str, Option(help="Key sent to the backend.", envvar="VLLM_API_KEY")] = "",
    max_in_flight: Annotated[
        int | None, Option(min=1, help="Maximum sequences in flight.", show_default="auto")
    ] = None,
    relative_cost: Annotated[float, Option(min=0.001, help="Relative time for the same work.")] = 1.0,
) -> None:
    """Add a backend. It gets requests once its health probe succeeds, and stays until it is removed."""
    settings = {"url": url, "name": name, "api_key": api_key, "relative_cost": relative_cost}
    if max_in_flight is not None:
        settings["max_in_flight"] = max_in_flight
    added = ask_gateway(context.obj, "/admin/backends", "POST", settings)["backend"]
    typer.echo(f"added {added['name']} ({added['url']})")


@backend_commands.command("drain")
def backends_drain(context: typer.Context, name: BackendName, wait: Wait = False) -> None:
    """Send a backend no new requests; those in flight end normally."""
    _drain(context.obj, name, wait)


@backend_commands.command("undrain")
def backends_undrain(context: typer.Context, name: BackendName) -> None:
    """Send a drained backend new requests again."""
    backend = ask_gateway(context.obj, f"/admin/backends/{quote(name, safe='')}/undrain", "POST")["backend"]
    typer.echo(f"{name} is {'draining: ' + backend['draining'] if backend['draining'] else backend['state']}")


@backend_commands.command("remove")
def backends_remove(context: typer.Context, name: BackendName, wait: Wait = False) -> None:
    """Remove a backend: it gets no new requests, and leaves when the last one has ended."""
    if wait:
        _drain(context.obj, name, wait)
    ask_gateway(context.obj, f"/admin/backends/{quote(name, safe='')}", "DELETE")
    typer.echo(f"removed {name}")


def _drain(admin: str, name: str, wait: bool) -> None:
    """Drain a backend, and with `wait` show how much is left there until nothing is."""
    path, shown = f"/admin/backends/{quote(name, safe='')}/drain", None
    while True:
        answer = ask_gateway(admin, f"{path}?wait_seconds={1 if wait and shown is not None else 0}", "POST")
        left = answer["backend"]["in_flight"]
        if left != shown:
            shown = left
            typer.echo(f"{name}: {left} sequences in flight" if left else f"{name}: drained")
        if answer["drained"] or not wait:
            return


@app.command()
def reload(
    admin: AdminUrl = ADMIN_URL, json: Annotated[bool, Option("--json", help="Print JSON instead of lines.")] = False
) -> None:
    """Make a running gateway read its configuration file again, and show what has changed."""
    done = ask_gateway(admin, "/admin/reload", "POST")
    if json:
        print_json(done)
        return
    for what, title in (("changed", "changed"), ("needs_restart", "needs a restart")):
        for each in done[what]:
            before, after = each["before"], each["after"]
            values = after or before if None in each.values() else f"{before} -> {after}"
            typer.echo(f"{title}: {each['path']}: {values}")
    if not done["changed"] and not done["needs_restart"]:
        typer.echo("nothing has changed")


@app.command()
def restart(admin: AdminUrl = ADMIN_URL) -> None:
    """Replace a running gateway by a new process, which takes over its ports, clients and what it has learned."""
    done = ask_gateway(admin, "/admin/restart", "POST", timeout_seconds=_RESTART_SECONDS)
    typer.echo(f"process {done['pid']} serves; process {done['former_pid']} ends when its last response has ended")


@app.command()
def plan(
    model: Annotated[
        str, Argument(help="A model's folder, its config.json, or the URL of a running backend.", metavar="MODEL")
    ] = "",
    preset: Annotated[str | None, Option(help="A model by its name, such as llama-3.1-8b, instead of MODEL.")] = None,
    gpu: Annotated[str | None, Option(help="Name of the GPU, such as h100: its memory and its speed.")] = None,
    gpu_memory_gib: Annotated[float | None, Option(min=1, help="Memory of one GPU in GiB.")] = None,
    gpus: Annotated[int, Option(min=1, help="Number of GPUs.")] = 1,
    tensor_parallel_size: Annotated[
        int | None, Option(min=1, help="As in vLLM.", show_default="1, 2, 4 and 8 are compared")
    ] = None,
    pipeline_parallel_size: Annotated[int, Option(min=1, help="As in vLLM.")] = 1,
    gpu_memory_utilization: Annotated[float, Option(min=0.01, max=1, help="As in vLLM.")] = 0.92,
    max_model_len: Annotated[int | None, Option(min=1, help="As in vLLM.", show_default="the model's")] = None,
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], Option(help="As in vLLM.")] = "auto",
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "bfloat16", "float16"], Option(help="As in vLLM.")] = "auto",
    quantization: Packing = "auto",
    concurrency: Annotated[int | None, Option(min=1, help="Expected concurrent requests.")] = None,
    prompt_tokens: Annotated[int | None, Option(min=0, help="Per request.", show_default="1024")] = None,
    output_tokens: Annotated[int | None, Option(min=0, help="Per request.", show_default="256")] = None,
    shared_prefix_tokens: Annotated[
        int, Option(min=0, help="Tokens at the start that all prompts share, such as a system prompt.")
    ] = 0,
    max_num_seqs: Annotated[int | None, Option(min=1, help="The value vLLM runs with, to check it.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, Option(min=1, help="As in vLLM.", show_default="vLLM's default for the GPU")
    ] = None,
    block_size: Annotated[int | None, Option(min=1, help="As in vLLM.", show_default="16")] = None,
    reserve_gib: Annotated[
        float | None,
        Option(min=0, help="GPU memory in GiB needed beside weights and KV cache.", show_default="estimated"),
    ] = None,
    fields: Annotated[
        list[str] | None, Option("--set", help="Value of a field that config.json lacks; repeatable.", metavar="F=N")
    ] = None,
    api_key: Annotated[str, Option(help="API key of the running backend.", envvar="VLLM_API_KEY")] = "",
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the GPU memory that a model needs, how many requests fit by length, and which settings to use."""
    from gateway.plan.command import PlanRequest, ask_running, plan_model, running_document, workload_of
    from gateway.plan.model import PlanError

    try:
        workload = workload_of(prompt_tokens, output_tokens, shared_prefix_tokens, concurrency)
        if model.startswith(("http://", "https://")):
            document = running_document(model, ask_running(model, api_key), workload, max_num_seqs)
        else:
            request = PlanRequest(
                model, gpu_memory_gib, gpus, tensor_parallel_size, gpu_memory_utilization, max_model_len, dtype,
                kv_cache_dtype, quantization, max_num_seqs, max_num_batched_tokens, block_size, reserve_gib,
                tuple(fields or ()), preset, gpu, pipeline_parallel_size,
            )  # fmt: skip
            document = plan_model(request, workload)
    except PlanError as error:
        fail(str(error), INVALID)
    show(document, json, "plan.jinja")


@app.command()
def healthcheck(
    url: Annotated[str | None, Option(help="URL that must return 200.", show_default="/livez of the gateway")] = None,
    timeout: Annotated[float, Option(min=0.1, help="Timeout in seconds.")] = 2.0,
    file: ConfigFile = None,
) -> None:
    """Exit with 0 if a URL returns 200, else with 1. For container health checks.

    Without --url, it is /livez at server.port of the configuration file, or at port 8080 if there is no such file.
    """
    from gateway.cli.client import get, livez_url, why

    own = url is None  # of this machine: its certificate is for other names
    if url is None:
        from gateway.config import ConfigError

        try:
            url = livez_url(file)
        except ConfigError as error:
            fail(str(error), FAILED)
    try:
        status, _ = get(url, timeout, most_bytes=0, verify=not own)
    except OSError as error:
        fail(f"{url}: {why(error)}", FAILED)
    if status != 200:
        fail(f"{url} returned {status}", FAILED)


@config_commands.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the configuration file."""
    from gateway.config import Config

    print_json(Config.model_json_schema())


@config_commands.command("print")
def config_print(
    file: ConfigFile = None,
    backend: BackendUrls = None,
    host: Host = None,
    port: Port = None,
    admin_port: AdminPort = None,
    no_admin: NoAdmin = False,
    api_key: ApiKeys = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Print the effective configuration as YAML, defaults included, secrets masked."""
    config = _load(_reader(file, backend, host, port, admin_port, no_admin, api_key, log_level, log_format))
    import yaml

    from gateway.config import masked

    typer.echo(yaml.safe_dump(masked(config.model_dump(mode="json")), sort_keys=False), nl=False)


def _reader(
    file: Path | None,
    backends: list[str] | None,
    host: Host = None,
    port: Port = None,
    admin_port: AdminPort = None,
    no_admin: bool = False,
    api_keys: list[str] | None = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> "Callable[[], Config]":
    """Reads the configuration, now and for each reload. What it returns raises ConfigError."""
    if no_admin and admin_port is not None:
        raise typer.BadParameter("--admin-port and --no-admin are mutually exclusive")
    from gateway.config.file import load

    log = {"level": log_level, "format": log_format}
    return partial(load, file, backends or (), host, port, "off" if no_admin else admin_port, api_keys or (), log=log)


def _with_keys_file(read: "Callable[[], Config]") -> "Callable[[], Config]":
    from gateway.config.keys_file import checked

    return lambda: checked(read())


def _load(read: "Callable[[], Config]") -> "Config":
    from gateway.config import ConfigError

    try:
        return read()
    except ConfigError as error:
        fail(str(error), INVALID)


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
