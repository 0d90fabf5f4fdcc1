"""A client connects as the configuration describes the server."""

from typing import Any

import pytest

from gateway.config.coordination import CoordinationConfig

pytest.importorskip("redis")
from gateway.coordination.redis_client import new_client


def options(**values: Any) -> dict[str, Any]:
    """What the connections of a client are made with."""
    kwargs: dict[str, Any] = new_client(CoordinationConfig(**values), "fleet:a").connection_pool.connection_kwargs
    return kwargs


def test_a_client_connects_to_the_host_with_the_password() -> None:
    found = options(url="redis://cache:7000/2", username="gateway", password="secret")
    assert (found["host"], found["port"], found["db"]) == ("cache", 7000, 2)
    assert (found["username"], found["password"], found["client_name"]) == ("gateway", "secret", "fleet:a")


def test_a_client_checks_the_certificate_of_a_server_with_tls() -> None:
    found = options(url="rediss://cache", ca="/ca.pem")
    assert found["ssl_ca_certs"] == "/ca.pem"
    assert found["ssl_cert_reqs"].name == "CERT_REQUIRED"


def test_a_client_connects_to_a_unix_socket() -> None:
    assert options(url="unix:///run/valkey.sock")["path"] == "/run/valkey.sock"


def test_a_client_asks_the_sentinels_with_their_own_password() -> None:
    client = new_client(
        CoordinationConfig(url="redis+sentinel://a,b:7/fleet/1", password="secret", sentinel_password="other"),
        "fleet:a",
    )
    sentinels = client.connection_pool.sentinel_manager.sentinels  # type: ignore[attr-defined]
    asked = [each.connection_pool.connection_kwargs for each in sentinels]
    assert [(each["host"], each["port"], each["password"]) for each in asked] == [
        ("a", 26379, "other"),
        ("b", 7, "other"),
    ]
    assert client.connection_pool.connection_kwargs["password"] == "secret"
    assert client.connection_pool.connection_kwargs["db"] == 1


def test_a_client_retries_nothing_by_itself() -> None:
    assert options(url="redis://cache")["retry"]._retries == 0
