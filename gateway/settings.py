"""Types of configuration values, and their checks."""

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from typing import Annotated, Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")
_MOST_SECONDS = 1e8  # three years: timers take no more
Seconds = Annotated[float, Field(gt=0, le=_MOST_SECONDS)]
SecondsOrZero = Annotated[float, Field(ge=0, le=_MOST_SECONDS)]
Count = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
_TCP = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}")
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MAX_HOST_LENGTH = 253
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.IGNORECASE)


S = TypeVar("S", bound="Section")


def default(value: T, description: str, **rules: Any) -> T:
    """A key with a default. `rules` limits its values further than their type does."""
    return cast(T, Field(value, description=description, **rules))


class Section(BaseModel):
    """A part of the file: unknown keys are refused, values never change.

    White space at the ends of a text is never part of it: secrets often come from files that end with a newline.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True)


def _checked_host(host: str) -> str:
    """The host, if it is an IP address or a name that can be looked up."""
    with suppress(ValueError):
        ip_address(host)
        return host
    name = host.removesuffix(".")
    if len(name) > _MAX_HOST_LENGTH or not all(map(_HOST_LABEL.fullmatch, name.split("."))):
        raise ValueError(f"{host!r} is not a host name (labels of 1 to 63 letters, digits, - or _; at most 253 in all)")
    return host


def _checked_endpoint(endpoint: str) -> str:
    if not _TCP.fullmatch(endpoint):
        raise ValueError("must look like tcp://host:port")
    if not 0 < int(endpoint.rpartition(":")[2]) < 65536:
        raise ValueError("the port must be a number from 1 to 65535")
    if (host := endpoint[len("tcp://") :].rpartition(":")[0]) != "*":
        _checked_host(host.removeprefix("[").removesuffix("]"))
    return endpoint


def _checked_origin(url: str) -> str:
    if "://" not in url:
        url = f"http://{url}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must look like http://host:port")
    if not url.isprintable():
        raise ValueError("must not contain control characters")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("the port must be a number from 1 to 65535")
    _checked_host(parts.hostname)
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ValueError("must be scheme, host and port only, without path, query or user")
    return url.rstrip("/")


def _checked_instant(value: Any) -> Any:
    """A time with its zone, as text or as YAML reads it: a number would be read as seconds since 1970."""
    text = value.isoformat() if hasattr(value, "isoformat") else value
    if not (isinstance(text, str) and _RFC_3339.fullmatch(text)):
        raise ValueError("must be a time with its zone (RFC 3339), such as 2027-01-31T00:00:00Z")
    return value


def _not_blank(secret: Any) -> Any:
    """A secret of only white space would count as none, and leave the port open."""
    if isinstance(secret, str) and secret and not secret.strip():
        raise ValueError("has only white space; set a secret, or leave the key out")
    return secret


def check_installed(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise ValueError(f"requires packages that are not installed: pip install 'vllm-batching-gateway[{extra}]'")


def twice(names: Iterable[str]) -> list[str]:
    return sorted(name for name, times in Counter(names).items() if times > 1)


def refuse(section: S, wrong: list[str]) -> S:
    """The section, if nothing is wrong with it. Raises ValueError with a line for each problem."""
    if wrong:
        raise ValueError("\n".join(wrong))
    return section


def _positive_or_auto(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError("must be at least 1, or auto")
    return value


def _checked_network(network: str) -> str:
    try:
        return str(ip_network(network, strict=False))
    except ValueError:
        raise ValueError(f"{network!r} is neither an IP address nor a network such as 10.0.0.0/8") from None


def _checked_origin_of_pages(origin: str) -> str:
    parts = urlsplit(origin)
    if origin != "*" and (not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}" or "@" in parts.netloc):
        raise ValueError("must look like https://chat.example.com, without a path, or be *")
    return origin.lower()


Secret = Annotated[str, BeforeValidator(_not_blank)]
ListenHost = Annotated[str, AfterValidator(lambda host: _checked_host(host) if host else host)]  # "" = all addresses
HostName = Annotated[str, AfterValidator(lambda name: _checked_host(name).lower().removesuffix("."))]
Endpoint = Annotated[str, AfterValidator(_checked_endpoint)]
CountOrAuto = Annotated[int | Literal["auto"], AfterValidator(_positive_or_auto)]
Network = Annotated[str, AfterValidator(_checked_network)]
Origin = Annotated[str, AfterValidator(_checked_origin_of_pages)]
BackendUrl = Annotated[str, AfterValidator(_checked_origin)]
Instant = Annotated[AwareDatetime, BeforeValidator(_checked_instant)]
