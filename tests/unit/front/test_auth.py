import hashlib

import pytest

from gateway.config.keys import KeyConfig
from gateway.errors import Unauthorized
from gateway.front.rate_limits import check_key

ANN = KeyConfig(name="ann", key="secret-a")
BOB = KeyConfig(name="bob", key_sha256=hashlib.sha256(b"secret-b").hexdigest())
KEYS = [ANN, BOB]


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({b"authorization": b"Bearer secret-a"}, ANN),
        ({b"authorization": b"bearer secret-b"}, BOB),
        ({b"authorization": b"BEARER  secret-a "}, ANN),
        ({b"x-api-key": b"secret-b"}, BOB),
        ({b"authorization": b"Basic x", b"x-api-key": b"secret-a"}, ANN),
    ],
)
def test_a_known_key_is_found_in_either_header(headers: dict[bytes, bytes], key: KeyConfig) -> None:
    assert check_key(KEYS, headers) is key


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b""},
        {b"authorization": b"Bearer"},
        {b"authorization": b"Bearer "},
        {b"authorization": b"Bearer wrong"},
        {b"authorization": b"Bearer secret-"},
        {b"authorization": b"Bearer secret-ab"},
        {b"authorization": b"Basic secret-a"},
        {b"authorization": b"secret-a"},
        {b"authorization": b"Bearer wrong", b"x-api-key": b"secret-a"},
        {b"x-api-key": b""},
        {b"x-api-key": b"  "},
        {b"authorization": b"Bearer   "},
        {b"authorization": b"Bearer " + BOB.key_sha256.encode()},
        {b"authorization": b"Bearer \xff"},
    ],
)
def test_anything_else_is_unauthorized(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(Unauthorized, match="Incorrect or missing"):
        check_key(KEYS, headers)


def test_the_error_does_not_repeat_the_key() -> None:
    with pytest.raises(Unauthorized) as error:
        check_key(KEYS, {b"authorization": b"Bearer hunter2"})
    assert "hunter2" not in error.value.message


def test_no_key_that_is_configured_lets_a_request_without_one_in() -> None:
    no_digest = KeyConfig.model_construct(name="no-digest", key="", key_sha256="0" * 64)
    nothing = KeyConfig.model_construct(name="nothing", key="", key_sha256=hashlib.sha256(b"").hexdigest())
    for headers in ({}, {b"x-api-key": b" "}, {b"authorization": b"Bearer  "}):
        with pytest.raises(Unauthorized):
            check_key([no_digest, nothing], headers)
