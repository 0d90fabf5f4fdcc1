"""The URL of the server through which gateways share a fleet."""

import re

import pytest

from gateway.config import ConfigError, masked
from gateway.config.file import parse
from gateway.features.coordination.settings import StoreAddress, parsed_address


def coordination(**values: object) -> dict[str, object]:
    return {"backends": [{"url": "http://127.0.0.1:1"}], "coordination": values}


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache", StoreAddress("", (("cache", 6379),), False, 0, "")),
        ("redis://10.0.0.1:7000/2", StoreAddress("", (("10.0.0.1", 7000),), False, 2, "")),
        ("rediss://[::1]:7000", StoreAddress("", (("::1", 7000),), True, 0, "")),
        ("unix:///run/valkey.sock", StoreAddress("/run/valkey.sock", (), False, 0, "")),
        ("redis+sentinel://a,b:7/fleet", StoreAddress("", (("a", 26379), ("b", 7)), False, 0, "fleet")),
        ("rediss+sentinel://a/fleet/3", StoreAddress("", (("a", 26379),), True, 3, "fleet")),
    ],
)
def test_a_url_names_a_server(url: str, address: StoreAddress) -> None:
    assert parsed_address(url) == address


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://cache", "must look like redis://host:6379/0"),
        ("redis://:secret@cache", "set coordination.username and coordination.password"),
        ("redis://a,b", "several hosts are for redis+sentinel://"),
        ("redis://", "is not host:port"),
        ("redis://cache:0", "the port must be a number"),
        ("redis://cache/x", "the number of a database"),
        ("redis://cache/0?protocol=3", "no query"),
        ("redis+sentinel://a", "must end with the name that the Sentinels know"),
        ("unix://run/valkey.sock", "unix:///path/of/socket"),
    ],
)
def test_a_url_that_names_none_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse(coordination(url=url))


def test_without_a_url_a_gateway_is_alone() -> None:
    assert parse(coordination()).coordination.url == ""


def test_passwords_are_not_shown() -> None:
    config = parse(coordination(url="redis://cache", password="a", sentinel_password="b"))
    shown = masked(config.model_dump(mode="json"))["coordination"]
    assert (shown["url"], shown["password"], shown["sentinel_password"]) == ("redis://cache", "***", "***")
