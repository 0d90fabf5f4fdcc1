"""A configuration that is read again: what differs, what is applied, and what needs a restart."""

import asyncio
from typing import Any

import pytest

from gateway.config import Config, ConfigError
from gateway.config_file import parse
from gateway.reload import APPLIED, Reloads, applicable, differences

KEY = {"name": "team-a", "key": "sk-secret-a"}


def config(**sections: Any) -> Config:
    return parse({"backends": [{"url": "http://a:1", "name": "a"}], **sections})


def paths(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    return {each.path: (each.before, each.after) for each in differences(old, new)}


def test_equal_configurations_do_not_differ() -> None:
    assert paths(config(auth={"keys": [KEY]}), config(auth={"keys": [KEY]})) == {}


def test_values_are_shown_with_their_path() -> None:
    new = config(routing={"aging": 0.5}, models={"aliases": {"gpt": "m"}}, server={"admin": None})
    assert paths(config(models={"aliases": {"old": "m"}}), new) == {
        "routing.aging": (0.05, 0.5),
        "models.aliases.old": ("m", None),
        "models.aliases.gpt": (None, "m"),
        "server.admin": ({"host": "127.0.0.1", "port": 8081, "allowed_hosts": []}, None),
    }


def test_backends_and_keys_are_compared_by_name_and_secrets_are_masked() -> None:
    backends = [{"url": "http://b:1", "name": "b"}, {"url": "http://a:2", "name": "a", "api_key": "sk-x"}]
    keys = [{"name": "team-b", "key": "sk-b"}, {"name": "team-a", "key": "sk-other", "weight": 2}]
    old, new = config(auth={"keys": [KEY]}), parse({"backends": backends, "auth": {"keys": keys}})
    assert paths(old, new) == {
        "backends.b": (None, "added"),
        "backends.a.url": ("http://a:1", "http://a:2"),
        "backends.a.api_key": ("***", "***"),
        "auth.keys.team-b": (None, "added"),
        "auth.keys.team-a.key": ("***", "***"),
        "auth.keys.team-a.weight": (1.0, 2.0),
    }
    assert paths(new, old)["backends.b"] == ("removed", None)
    assert "sk-" not in repr(differences(old, new))


def test_every_path_that_is_applied_exists() -> None:
    for path in APPLIED:
        section, _, key = path.partition(".")
        assert not key or key in type(getattr(config(), section)).model_fields, path


def test_what_needs_a_restart_keeps_its_value() -> None:
    old = config()
    new = config(routing={"aging": 0.5}, auth={"keys": [KEY], "cache_salt_secret": "x"}, server={"max_body_bytes": 7})
    merged = applicable(old, new)
    assert [key.name for key in merged.auth.keys] == ["team-a"]
    assert (merged.server.max_body_bytes, merged.routing.aging, merged.auth.cache_salt_secret) == (7, 0.05, "")


def test_a_reload_applies_once_and_lists_what_it_could_not() -> None:
    async def main() -> None:
        read, followed = [config(server={"max_body_bytes": 7, "port": 1})], list[Config]()
        reloads = Reloads(config(), lambda: read[0], followed.append)
        for _ in range(2):
            done = await reloads.reload()
            assert done["needs_restart"] == [{"path": "server.port", "before": 8080, "after": 1}]
        assert [(each.server.max_body_bytes, each.server.port) for each in followed] == [(7, 8080)]

    asyncio.run(main())


def test_a_configuration_that_is_wrong_changes_nothing() -> None:
    def load() -> Config:
        raise ConfigError("backends: is missing")

    async def main() -> None:
        followed = list[Config]()
        with pytest.raises(ConfigError, match="backends: is missing"):
            await Reloads(config(), load, followed.append).reload()
        assert followed == []

    asyncio.run(main())
