import hashlib

import pytest

from gateway.core.errors import KeyExpired, Unauthorized
from gateway.features.keys.rate_limits import ApiKeys
from gateway.features.keys.settings import KeyConfig
from tests.unit.front.wires import Clock

ANN = KeyConfig(name="ann", key="secret-a")
BOB = KeyConfig(name="bob", key_sha256=hashlib.sha256(b"secret-b").hexdigest())
KEYS = ApiKeys([ANN, BOB], Clock())
NEW_YEAR = 1_798_761_600.0  # 2027-01-01T00:00:00Z


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
    assert KEYS.check(headers) is key


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
        KEYS.check(headers)


def test_the_error_does_not_repeat_the_key() -> None:
    with pytest.raises(Unauthorized) as error:
        KEYS.check({b"authorization": b"Bearer hunter2"})
    assert "hunter2" not in error.value.message


def test_no_key_that_is_configured_lets_a_request_without_one_in() -> None:
    no_digest = KeyConfig.model_construct(name="no-digest", key="", key_sha256="0" * 64)
    nothing = KeyConfig.model_construct(name="nothing", key="", key_sha256=hashlib.sha256(b"").hexdigest())
    for headers in ({}, {b"x-api-key": b" "}, {b"authorization": b"Bearer  "}):
        with pytest.raises(Unauthorized):
            ApiKeys([no_digest, nothing], Clock()).check(headers)


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_a_key_is_refused_from_its_expiry_on() -> None:
    clock = Clock(NEW_YEAR - 1)
    keys = ApiKeys([ANN, KeyConfig(name="eve", key="secret-e", expires_at="2027-01-01T01:00:00+01:00")], clock)
    assert keys.check({b"x-api-key": b"secret-e"}).name == "eve"
    clock.now = NEW_YEAR
    with pytest.raises(KeyExpired, match="has expired"):
        keys.check({b"x-api-key": b"secret-e"})
    assert keys.check({b"x-api-key": b"secret-a"}) is ANN


def test_an_earlier_secret_is_valid_until_its_own_expiry_and_no_longer_than_the_key() -> None:
    clock = Clock(NEW_YEAR - 1)
    previous = [
        {"key_sha256": sha256("older"), "expires_at": "2027-01-01T00:00:00Z"},
        {"key_sha256": sha256("old"), "expires_at": "2028-01-01T00:00:00Z"},
    ]
    key = KeyConfig(name="ann", key="new", previous=previous, expires_at="2027-01-01T00:00:10Z")
    keys = ApiKeys([key], clock)
    for secret in (b"older", b"old", b"new"):
        assert keys.check({b"x-api-key": secret}) is key
    clock.now = NEW_YEAR
    assert keys.check({b"x-api-key": b"old"}) is keys.check({b"x-api-key": b"new"}) is key
    with pytest.raises(KeyExpired):
        keys.check({b"x-api-key": b"older"})
    clock.now = NEW_YEAR + 10
    for secret in (b"old", b"new"):
        with pytest.raises(KeyExpired):
            keys.check({b"x-api-key": secret})


@pytest.mark.parametrize(
    ("models", "allowed", "refused"),
    [
        (None, ["m", "anything"], []),
        (["m"], ["m"], ["M", "m2", "", "*"]),
        (["gpt-*", "m"], ["gpt-", "gpt-4o", "m"], ["gpt", "GPT-4o", "my-gpt-4o"]),
        (["*"], ["m", ""], []),
    ],
)
def test_models_are_allowed_by_whole_names_and_beginnings(
    models: list[str] | None, allowed: list[str], refused: list[str]
) -> None:
    key = KeyConfig(name="ann", key="k", models=models)
    assert [name for name in (*allowed, *refused) if key.allows(name)] == allowed
