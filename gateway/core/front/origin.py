"""Where a request comes from: the client's address behind proxies, and the web page behind a browser (CORS)."""

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

FORWARDED_FOR = b"x-forwarded-for"
ORIGIN = b"origin"
USER_AGENT = b"user-agent"
_ALL = "*"
PREFLIGHT = (
    b"access-control-allow-methods: GET, POST\r\n"
    b"access-control-allow-headers: authorization, *\r\n"  # for browsers, * does not include authorization
    b"access-control-max-age: 86400\r\n"
)


class TrustedProxies:
    """Proxies that are believed when they name their client. `networks`: IP addresses or networks."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks: list[IPv4Network | IPv6Network] = [ip_network(each) for each in networks]

    def client(self, peer: str, forwarded_for: bytes) -> str:
        """The client's address: the last address of X-Forwarded-For that is not a trusted proxy's.

        `peer`: the other end of the connection. Addresses written by the client are left of the proxies', and ignored.
        """
        address = peer
        for each in reversed(forwarded_for.split(b",")):
            if not self._trusts(address):
                break
            found = _address_of(each.strip())
            if not found:
                break
            address = found
        return address

    def _trusts(self, address: str) -> bool:
        try:
            found = ip_address(address)
        except ValueError:
            return False
        mapped = getattr(found, "ipv4_mapped", None)  # how a socket for both families shows IPv4
        return any((mapped or found) in network for network in self._networks)


def _address_of(entry: bytes) -> str:
    """An entry of X-Forwarded-For without its port; empty = it is no address."""
    text = entry.decode("latin-1")
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ip_address(text))
    except ValueError:
        return ""


class WebPages:
    """The web pages that may call the API, by their origins; "*" = all."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def allow(self, origin: bytes) -> bool:
        return _ALL in self._origins or origin.decode("latin-1").lower() in self._origins

    def headers(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Lines of the response that let the page read it; none for another page."""
        origin = headers.get(ORIGIN, b"")
        if not origin or not self.allow(origin):
            return b"vary: origin\r\n"
        return b"vary: origin\r\naccess-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\n" % origin
