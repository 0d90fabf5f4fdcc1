"""The commands `gateway keys ...`, which change the keys file. A running gateway follows it within a second."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from gateway.cli.terminal import FAILED, INVALID, ConfigFile, ask_gateway, fail, show

if TYPE_CHECKING:
    from gateway.cli.key_store import KeyStore
    from gateway.features.keys.settings import KeyConfig

KeysFile = Annotated[
    Path | None,
    Option("--file", help="The keys file.", metavar="FILE", show_default="auth.keys_file of the configuration"),
]
KeyName = Annotated[str, Argument(help="Name of the key in logs, metrics and reports.", metavar="NAME")]
_EXPIRES = "When the key expires: a duration such as 90d, a date (UTC), a time such as 2027-01-31T12:00:00Z, or never."

_LIMITS = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "tokens_per_day": "tokens/day",
    "tokens_per_month": "tokens/month",
    "max_concurrent_requests": "concurrent",
}

key_commands = typer.Typer(no_args_is_help=True, help="Create, rotate and revoke API keys in the keys file.")


@key_commands.command("new")
def keys_new(
    name: KeyName,
    config: ConfigFile = None,
    file: KeysFile = None,
    expires: Annotated[str, Option(help=_EXPIRES)] = "never",
    models: Annotated[
        str | None,
        Option(help="Models that the key may use, separated by commas; `*` at the end of a name.", show_default="all"),
    ] = None,
    requests_per_minute: Annotated[int | None, Option(min=1, help="Maximum requests per minute.")] = None,
    tokens_per_minute: Annotated[int | None, Option(min=1, help="Maximum tokens per minute.")] = None,
    tokens_per_day: Annotated[int | None, Option(min=1, help="Budget of tokens per day (UTC).")] = None,
    tokens_per_month: Annotated[int | None, Option(min=1, help="Budget of tokens per calendar month (UTC).")] = None,
    max_concurrent: Annotated[int | None, Option(min=1, help="Maximum running and queued requests.")] = None,
    priority: Annotated[Literal["interactive", "batch"], Option(help="Class of its requests.")] = "interactive",
    isolate_cache: Annotated[bool, Option("--isolate-cache", help="Share no cached prefixes with other keys.")] = False,
    weight: Annotated[float, Option(min=0.001, help="Relative share of tokens while other tenants wait.")] = 1.0,
) -> None:
    """Create a key and print it. Only its SHA-256 is stored: the key itself cannot be shown again."""
    from pydantic import ValidationError

    from gateway.cli.key_store import expiry_of
    from gateway.config.errors import error_lines

    with _store(file, config) as store:
        settings: dict[str, Any] = {
            "name": name,
            "expires_at": expiry_of(expires, _now()),
            "models": None if models is None else [each.strip() for each in models.split(",")],
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "tokens_per_day": tokens_per_day,
            "tokens_per_month": tokens_per_month,
            "max_concurrent_requests": max_concurrent,
            "priority": priority,
            "isolate_cache": isolate_cache,
            "weight": weight,
        }
        try:
            secret = store.add(settings)
        except ValidationError as error:
            fail("\n".join(error_lines(error)), INVALID)
    typer.echo(f"gateway: added {name} to {store.file}; this is shown once:", err=True)
    typer.echo(secret)


@key_commands.command("list")
def keys_list(
    config: ConfigFile = None,
    file: KeysFile = None,
    admin: Annotated[
        str | None,
        Option(help="Admin port of a gateway, which knows when each key was last used.", metavar="URL"),
    ] = None,
    json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the keys of the file, with their expiry and limits. Secrets are unknown, and digests are not shown."""
    with _store(file, config) as store:
        keys = [_entry(key, _now()) for key in store.read()]
        if admin is not None:
            last_used = ask_gateway(admin, "/admin/usage").get("last_used", {})
            keys = [key | {"last_used": last_used.get(key["name"])} for key in keys]
        document = {"file": str(store.file), "keys": keys, "with_use": admin is not None}
    show(document, json, "keys.jinja")


@key_commands.command("rotate")
def keys_rotate(
    name: KeyName,
    config: ConfigFile = None,
    file: KeysFile = None,
    grace: Annotated[str, Option(help="How long the key before stays valid: 24h, 7d, or 0.")] = "24h",
    expires: Annotated[str | None, Option(help=_EXPIRES, show_default="as before")] = None,
) -> None:
    """Give a key another secret and print it. Usage, limits and cached prefixes stay those of the key."""
    from gateway.cli.key_store import duration_of, expiry_of

    now = _now()
    with _store(file, config) as store:
        expires_at = store.key(name).expires_at if expires is None else expiry_of(expires, now)
        if expires_at is not None and expires_at <= now:
            fail(f"{name} expired at {expires_at.isoformat()}: pass --expires as well", INVALID)
        secret = store.rotate(name, duration_of(grace), now, expires_at)
    typer.echo(f"gateway: rotated {name}; this is shown once:", err=True)
    typer.echo(secret)


@key_commands.command("revoke")
def keys_revoke(name: KeyName, config: ConfigFile = None, file: KeysFile = None) -> None:
    """Remove a key, its earlier secrets included. Requests in flight end normally."""
    with _store(file, config) as store:
        store.revoke(name)
    typer.echo(f"gateway: revoked {name}", err=True)


@contextmanager
def _store(file: Path | None, config: Path | None) -> "Iterator[KeyStore]":
    """The keys file; the command ends with the reason if a change of it is not possible."""
    from gateway.cli.key_store import KeysError, store_of

    try:
        yield store_of(file, config, dict(os.environ))
    except KeysError as error:
        fail(str(error), FAILED)


def _now() -> datetime:
    return datetime.now(UTC)


def _entry(key: "KeyConfig", now: datetime) -> dict[str, Any]:
    """A key as operators see it."""
    shown = key.model_dump(mode="json", exclude={"key", "key_sha256", "previous"})
    earlier = sorted(each.expires_at for each in key.previous if each.expires_at > now)
    return shown | {
        "expired": key.expires_at is not None and key.expires_at <= now,
        "previous_valid_until": earlier[-1].isoformat() if earlier else None,
        "limits": [f"{shown[field]:,} {what}" for field, what in _LIMITS.items() if shown[field] is not None],
    }
