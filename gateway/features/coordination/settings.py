"""The configuration of coordination: several gateways in front of one fleet, through Redis or Valkey."""

import re
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from gateway.settings import Count, Secret, Section, check_installed, default

_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")
_PORTS = {"redis": 6379, "rediss": 6379, "redis+sentinel": 26379, "rediss+sentinel": 26379}
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?")


class StoreAddress(NamedTuple):
    """A parsed URL. `sentinel_name`: the name under which Sentinels know the server; empty = no Sentinels."""

    socket_path: str
    hosts: tuple[tuple[str, int], ...]
    tls: bool
    database: int
    sentinel_name: str


def parsed_address(url: str) -> StoreAddress:
    """The parts of a URL of Redis or Valkey. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ValueError(
            "must look like redis://host:6379/0, rediss://host:6379/0 (TLS), unix:///path or"
            " redis+sentinel://host:26379,host:26379/name/0"
        )
    if parts.query or parts.fragment:
        raise ValueError("must have no query and no fragment")
    if "@" in parts.netloc:
        raise ValueError("must have no user and no password: set coordination.username and coordination.password")
    if parts.scheme == "unix":
        if parts.netloc or len(parts.path) < 2:
            raise ValueError("must look like unix:///path/of/socket")
        return StoreAddress(parts.path, (), False, database=0, sentinel_name="")
    has_sentinels = parts.scheme.endswith("+sentinel")
    hosts = tuple(_host(each, _PORTS[parts.scheme]) for each in parts.netloc.split(","))
    if len(hosts) > 1 and not has_sentinels:
        raise ValueError("must have one host; several hosts are for redis+sentinel://")
    rest = [each for each in parts.path.split("/") if each]
    name = rest.pop(0) if has_sentinels and rest else ""
    if has_sentinels and not name:
        raise ValueError("must end with the name that the Sentinels know: redis+sentinel://host:26379/name")
    if len(rest) > 1 or not all(each.isdecimal() and len(each) < 6 for each in rest):
        raise ValueError("must have at most the number of a database after the host")
    return StoreAddress(
        "", hosts, parts.scheme.startswith("rediss"), database=int(rest[0]) if rest else 0, sentinel_name=name
    )


def _host(address: str, port: int) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"{address!r} is not host:port")
    number = int(found["port"] or port)
    if not 0 < number < 65536:
        raise ValueError("the port must be a number from 1 to 65535")
    return found["host"].strip("[]"), number


def _checked_store(url: str) -> str:
    if url:
        parsed_address(url)
        check_installed("hiredis", "coordination")
    return url


StoreUrl = Annotated[str, AfterValidator(_checked_store)]


class CoordinationConfig(Section):
    """Several gateways in front of one fleet, through Redis or Valkey."""

    url: StoreUrl = default(
        "",
        "URL of Redis or Valkey: redis://, rediss:// (TLS), unix:// or redis+sentinel://; empty = one gateway alone.",
    )
    username: str = default("", "User of an access control list; empty = the default user.")
    password: Secret = default("", "Password of Redis or Valkey; empty = none.")
    sentinel_password: Secret = default("", "Password of the Sentinels; empty = none.")
    ca: str = default("", "Path of the CA certificates (PEM) for TLS; empty = those of the system.")
    name: str = Field(
        default="gateway",
        description="Name of the fleet: gateways with the same name share it.",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
    )
    expected_replicas: Count = default(
        2,
        "Gateways assumed while the server has not been reached since the start: each uses an equal part of the caps.",
    )

    @property
    def address(self) -> StoreAddress:
        return parsed_address(self.url)
