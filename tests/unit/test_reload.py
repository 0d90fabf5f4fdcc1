"""A configuration that is read again: what differs, what is applied, and what needs a restart."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, ConfigError
from gateway.config_file import parse
from gateway.reload import NEEDS_RESTART, FileWatch, Reloads, applicable, differences

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


def test_only_listening_addresses_need_a_restart_and_keep_their_values() -> None:
    old, addresses = config(), {"host": "::1", "port": 1}
    new = config(routing={"aging": 0.5}, server={**addresses, "max_body_bytes": 7, "admin": {"host": "::1", "port": 2,
        "allowed_hosts": ["gateway.svc"]}})  # fmt: skip
    found = differences(old, new)
    assert {each.path for each in found if not each.applies} == {*NEEDS_RESTART} - {"server.admin"}
    merged = applicable(old, new)
    assert merged.server.admin is not None
    assert (merged.server.host, merged.server.port) == (old.server.host, old.server.port)
    assert (merged.server.admin.host, merged.server.admin.port) == ("127.0.0.1", 8081)
    assert (merged.server.admin.allowed_hosts, merged.server.max_body_bytes) == (("gateway.svc",), 7)
    assert {each.path for each in differences(merged, new)} == {each.path for each in found if not each.applies}


@pytest.mark.parametrize(("before", "after"), [({}, None), (None, {})])
def test_an_admin_port_comes_or_goes_at_a_restart(before: Any, after: Any) -> None:
    old, new = config(server={"admin": before}), config(server={"admin": after})
    assert [(each.path, each.applies) for each in differences(old, new)] == [("server.admin", False)]
    assert applicable(old, new) == old


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


async def test_a_file_is_watched_only_while_the_configuration_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.reload._LOOK_SECONDS", 0.0)
    file, changes, is_on = tmp_path / "gateway.yaml", list[int](), [False]
    watch = FileWatch(file, lambda: changes.append(1), lambda: is_on[0])  # it is not there yet
    file.write_text("a: 1")
    await watch.step()
    assert changes == []
    is_on[0] = True
    await watch.step()
    assert changes == []  # it was changed before it was watched
    file.write_text("a: 22")
    for _ in range(2):
        await watch.step()
    assert changes == [1]
