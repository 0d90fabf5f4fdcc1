"""Commands that read the configuration: `gateway serve`, `check`, `healthcheck` and `config`."""

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from typer import Option

from gateway.cli.serving import is_open_to_all, why_not_serving
from gateway.cli.terminal import FAILED, INVALID, ConfigFile, fail, print_json, show
from gateway.features.workers import WORKER

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.config import Config

_BACKEND = "URL of a vLLM server, such as http://10.0.0.11:8000; repeat for each backend."
BackendUrls = Annotated[list[str] | None, Option("--backend", help=_BACKEND, metavar="URL")]
_API_KEY = "API key of clients, or name=key; repeatable. Other users see it in `ps`: GATEWAY_API_KEYS hides it."
ApiKeys = Annotated[list[str] | None, Option("--api-key", help=_API_KEY, metavar="KEY")]
Host = Annotated[str | None, Option(help="Address to listen on; overrides server.host.")]
_PORT = "Port to listen on; 0 = any free port; overrides server.port."
Port = Annotated[int | None, Option(min=0, max=65535, help=_PORT)]
_ADMIN_PORT = "Port of /metrics and /admin/*; 0 = any free port; overrides server.admin.port."
AdminPort = Annotated[int | None, Option(min=0, max=65535, help=_ADMIN_PORT)]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None, Option(help="Lowest level logged; overrides log.level.")
]
_FORMAT = "Form of log lines: JSON, or for people; auto = for people on a terminal; overrides log.format."
LogFormat = Annotated[Literal["auto", "json", "console"] | None, Option(help=_FORMAT)]
NoAdmin = Annotated[bool, Option("--no-admin", help="Disable the admin port (/metrics and /admin/*).")]

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

config_commands = typer.Typer(no_args_is_help=True, help="Inspect the configuration.")


def add_to(app: typer.Typer) -> None:
    for command in (serve, check):
        app.command()(command)
    app.command(add_help_option=False, context_settings=_PASSED_ON)(demo)
    app.command()(healthcheck)
    app.add_typer(config_commands, name="config")


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
    if os.getpid() == 1:
        from gateway.features.handover.first import run_as_first

        sys.exit(run_as_first())
    read = _with_keys_file(
        _reader(
            file,
            backends=backend,
            host=host,
            port=port,
            admin_port=admin_port,
            no_admin=no_admin,
            api_keys=api_key,
            log_level=log_level,
            log_format=log_format,
        )
    )
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
    from gateway.features.handover.conversation import TakeoverRefused

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
    from gateway.features.workers import parent

    try:
        sys.exit(parent.serve(config))
    except OSError as error:
        fail(why_not_serving(error, config), FAILED)


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
    config = _load(
        _reader(
            file,
            backends=backend,
            host=host,
            port=port,
            admin_port=admin_port,
            no_admin=no_admin,
            api_keys=api_key,
            log_level=log_level,
            log_format=log_format,
        )
    )
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
    """Reads the configuration, now and for each reload. The returned function raises ConfigError."""
    if no_admin and admin_port is not None:
        raise typer.BadParameter("--admin-port and --no-admin are mutually exclusive")
    from gateway.config.file import load

    log = {"level": log_level, "format": log_format}
    return partial(
        load,
        file,
        backends or (),
        host=host,
        port=port,
        admin_port="off" if no_admin else admin_port,
        api_keys=api_keys or (),
        log=log,
    )


def _with_keys_file(read: "Callable[[], Config]") -> "Callable[[], Config]":
    from gateway.features.keys.keys_file import checked

    return lambda: checked(read())


def _load(read: "Callable[[], Config]") -> "Config":
    from gateway.config import ConfigError

    try:
        return read()
    except ConfigError as error:
        fail(str(error), INVALID)
