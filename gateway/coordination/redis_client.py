"""Clients of Redis or Valkey for one replica, as the configuration describes the server."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from gateway.config.coordination import CoordinationConfig

if TYPE_CHECKING:
    from redis.asyncio import Redis

CALL_SECONDS = 0.8  # at most for a call, its connection included: several must fail before a block lapses


def heed_cancellation() -> None:
    """End this task if it was cancelled: redis-py loses a cancellation that comes while it connects."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def shared_name(config: CoordinationConfig, what: str) -> str:
    """A key or a channel of the fleet; all have one hash tag."""
    return f"{{{config.name}}}:{what}"


def new_client(config: CoordinationConfig, name: str, answer_seconds: float | None = None) -> "Redis":
    """A client with connections of its own, which retries nothing. `name` is shown in the server's list of clients;
    `answer_seconds`: the most that it waits for an answer."""
    from redis.asyncio import Redis  # of a package that few need
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff

    address = config.address
    options: dict[str, Any] = {
        "username": config.username or None,
        "password": config.password or None,
        "db": address.database,
        "client_name": name,
        "socket_connect_timeout": CALL_SECONDS,
        "socket_timeout": answer_seconds,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
    }
    if address.socket_path:
        return Redis(unix_socket_path=address.socket_path, **options)
    options["socket_keepalive"] = True
    if address.tls:
        options |= {"ssl": True, "ssl_ca_certs": config.ca or None, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    if address.sentinel_name:
        own = {"password": config.sentinel_password or None, "socket_connect_timeout": CALL_SECONDS}
        own |= {"socket_timeout": CALL_SECONDS, **{key: options[key] for key in options if key.startswith("ssl")}}
        sentinels: Any = Sentinel
        client: Redis = sentinels(address.hosts, sentinel_kwargs=own, **options).master_for(address.sentinel_name)
        return client
    ((host, port),) = address.hosts
    return Redis(host=host, port=port, **options)


@asynccontextmanager
async def open_client(
    config: CoordinationConfig, name: str, answer_seconds: float | None = None
) -> AsyncIterator["Redis"]:
    """A client whose connections are closed at the end of the block."""
    client = new_client(config, name, answer_seconds)
    try:
        yield client
    finally:
        await client.aclose()
