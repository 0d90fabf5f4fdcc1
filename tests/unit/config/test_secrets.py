"""White space around secrets and other texts, over every setting that has one."""

import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, BeforeValidator, ValidationError

from gateway.config import SECRETS, Config
from gateway.config.file import of_environment
from gateway.settings import Secret

BLANKS = [" ", "\n", "\r\n", "\t", " \n\t"]
SPACES = [" x", "x\n", "x\r\n", "\tx", "x ", " x \n"]
_MARK = next(each for each in get_args(Secret) if isinstance(each, BeforeValidator))


def sections(kind: Any, seen: set[Any]) -> Iterator[type[BaseModel]]:
    """Every section that a type leads to."""
    for each in (kind, *get_args(kind)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            if each not in seen:
                seen.add(each)
                yield each
                for field in each.model_fields.values():
                    yield from sections(field.annotation, seen)
        elif each is not kind:
            yield from sections(each, seen)


def secret_fields() -> set[str]:
    """Settings of the type of secrets, as section.key."""
    found = set()
    for section in sections(Config, set()):
        for name, kind in typing.get_type_hints(section, include_extras=True).items():
            if _MARK in _metadata(kind):
                found.add(f"{section.__name__}.{name}")
    return found


def _metadata(kind: Any) -> list[Any]:
    own = list(kind.__metadata__) if typing.get_origin(kind) is Annotated else []
    return own + [each for part in get_args(kind) for each in _metadata(part)]


def _backend(secret: str) -> Any:
    return Config.model_validate({"backends": [{"url": "http://a:1", "api_key": secret}]}).backends[0].api_key


def _discovered(secret: str) -> Any:
    document = {"discovery": {"file": "/x", "backend": {"api_key": secret}}}
    return Config.model_validate(document).discovery.backend.api_key


def _config(section: str, **keys: Any) -> Any:
    document = {"backends": [{"url": "http://a:1"}], section: keys}
    return getattr(Config.model_validate(document), section)


READ: dict[str, Callable[[str], Any]] = {
    "KeyConfig.key": lambda secret: _config("auth", keys=[{"name": "n", "key": secret}]).keys[0].key,
    "AuthConfig.cache_salt_secret": lambda secret: _config("auth", cache_salt_secret=secret).cache_salt_secret,
    "BackendConfig.api_key": _backend,
    "DiscoveredBackend.api_key": _discovered,
    "AdminConfig.token": lambda secret: _config("server", admin={"token": secret}).admin.token,
    "CoordinationConfig.password": lambda secret: _config("coordination", password=secret).password,
    "CoordinationConfig.sentinel_password": lambda secret: (
        _config("coordination", sentinel_password=secret).sentinel_password
    ),
    "BatchesConfig.database": lambda secret: (
        _config("batches", path="s3://bucket", database=secret.replace("x", "postgresql://u:x@h/n")).database
    ),
}


def test_every_secret_is_in_the_table() -> None:
    """Those of the type, and all that are masked, but for digests, whose pattern leaves no choice."""
    assert secret_fields() == READ.keys()
    assert {each.partition(".")[2] for each in READ} == set(SECRETS) - {"key_sha256"}


@pytest.mark.parametrize("field", READ)
@pytest.mark.parametrize("secret", SPACES)
def test_white_space_at_the_ends_is_no_part_of_a_secret(field: str, secret: str) -> None:
    assert READ[field](secret) == READ[field]("x")


@pytest.mark.parametrize("field", READ)
@pytest.mark.parametrize("secret", BLANKS)
def test_a_secret_of_white_space_alone_is_refused(field: str, secret: str) -> None:
    """It must not count as none: without a token the admin port is open."""
    with pytest.raises(ValidationError, match="only white space"):
        READ[field](secret)


@pytest.mark.parametrize("section", [*sections(Config, set())], ids=lambda each: each.__name__)
def test_no_section_keeps_white_space_around_texts(section: type[BaseModel]) -> None:
    assert section.model_config.get("str_strip_whitespace")


def test_keys_in_the_environment_are_stripped_too() -> None:
    document = of_environment({"GATEWAY_BACKENDS": "http://a:1", "GATEWAY_API_KEYS": "team = x\n, y \r\n"})
    assert [key.key for key in Config.model_validate(document).auth.keys] == ["x", "y"]
    document = of_environment({"GATEWAY_BACKENDS": "http://a:1\n", "GATEWAY_SERVER__ADMIN__TOKEN": '"x\\n"'})
    admin = Config.model_validate(document).server.admin
    assert admin is not None
    assert admin.token == "x"
