import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.front.hosts import is_own_host

NAMES = {"gateway.svc"}


@pytest.mark.parametrize(
    "header",
    ["localhost", "LOCALHOST:8081", "a.localhost", "localhost.", "127.0.0.1", "127.0.0.1:8081", "10.1.2.3:80", "[::1]",
     "[::1]:8081", "[fe80::1%eth0]:1", "gateway.svc", "Gateway.SVC:8081", "gateway.svc.", "localhost:"],
)  # fmt: skip
def test_addresses_loopback_names_and_configured_names_are_own(header: str) -> None:
    assert is_own_host(header, NAMES)


@pytest.mark.parametrize(
    "header",
    ["", "evil.example", "evil.example:8081", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost",
     "evil.localhost.example", "gateway.svc.evil.example", "127.0.0.1:x", "localhost:80@evil.example", "2130706433",
     "[evil.example]", "127.1", "svc"],
)  # fmt: skip
def test_all_others_are_not(header: str) -> None:
    assert not is_own_host(header, NAMES)


@given(st.from_regex(r"[a-z0-9.-]{1,20}\\.example(:[0-9]{1,5})?", fullmatch=True))
def test_no_name_that_can_be_registered_is_own(header: str) -> None:
    assert not is_own_host(header, NAMES)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_address_is_own(address: object, port: int) -> None:
    host = f"[{address}]" if ":" in str(address) else str(address)
    assert is_own_host(host, ())
    assert is_own_host(f"{host}:{port}", ())
