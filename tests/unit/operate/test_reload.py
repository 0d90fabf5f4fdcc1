"""A configuration that is read again: what differs, what is applied, and what needs a restart."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, ConfigError
from gateway.config.file import parse
from gateway.features.operate.reload import NEEDS_RESTART, FileWatch, Reloads, applicable, differences
from tests.certificates import certificate

KEY = {"name": "team-a", "key": "sk-secret-a"}


def config(**sections: Any) -> Config:
    return parse({"backends": [{"url": "http://a:1", "name": "a"}], **sections})


def paths(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    return {each.path: (each.before, each.after) for each in differences(old, new)}


def test_equal_configurations_do_not_differ() -> None:
    assert paths(config(auth={"keys": [KEY]}), config(auth={"keys": [KEY]})) == {}


def test_values_are_shown_with_their_path() -> None:
    new = config(routing={"aging": 0.5}, models={"aliases": {"gpt": "m"}}, server={"metrics": {"port": 9}})
    assert paths(config(models={"aliases": {"old": "m"}}), new) == {
        "routing.aging": (0.05, 0.5),
        "models.aliases.old": ("m", None),
        "models.aliases.gpt": (None, "m"),
        "server.metrics": (None, {"host": "0.0.0.0", "port": 9, "allowed_hosts": []}),
    }


def test_backends_and_keys_are_compared_by_name_and_secrets_are_masked() -> None:
    backends = [{"url": "http://b:1", "name": "b"}, {"url": "http://a:2", "name": "a", "api_key": "sk-x"}]
    keys = [{"name": "team-b", "key": "sk-b"}, {"name": "team-a", "key": "sk-other", "weight": 2}]
    old, new = config(auth={"keys": [KEY]}), parse({"backends": backends, "auth": {"keys": keys}})
    assert paths(old, new) == {
        "backends.b": (None, "added"),
        "backends.a.url": ("http://a:1", "http://a:2"),
        "backends.a.api_key": ("", "***"),
        "auth.keys.team-b": (None, "added"),
        "auth.keys.team-a.key": ("***", "***"),
        "auth.keys.team-a.weight": (1.0, 2.0),
    }
    assert paths(new, old)["backends.b"] == ("removed", None)
    assert "sk-" not in repr(differences(old, new))


def test_only_listening_addresses_and_tls_need_a_restart_and_keep_their_values(tmp_path: Path) -> None:
    old, addresses = config(server={"metrics": {}}), {"host": "::1", "port": 1, "workers": 2}
    tls = {"certificate": str(certificate(tmp_path, name="IP:127.0.0.1", days=1))}
    server = {**addresses, "tls": tls, "max_body_bytes": 7, "metrics": {"host": "::1", "port": 3}}
    admin = {"host": "::1", "port": 2, "allowed_hosts": ["gateway.svc"], "token": "s3cret"}
    batches = {"path": "s3://bucket", "database": "postgresql://h/d", "s3_endpoint": "http://h", "s3_region": "r"}
    coordination = {"url": "redis://cache", "name": "b", "ca": "/ca.pem", "expected_replicas": 3}
    coordination |= {"username": "u", "password": "s3cret", "sentinel_password": "s3cret"}
    more = {"batches": batches, "coordination": coordination}
    new = config(routing={"aging": 0.5}, server={**server, "admin": admin}, **more)
    found = differences(old, new)
    assert {each.path for each in found if not each.applies} == {*NEEDS_RESTART} - {
        *("server.admin", "server.metrics"),
        *("server.tls.certificate", "server.tls.key", "server.tls.client_ca"),
    }
    merged = applicable(old, new)
    assert merged.server.admin is not None
    assert merged.server.tls is None
    assert merged.batches.path is None
    assert merged.coordination == old.coordination
    assert merged.server.metrics == old.server.metrics
    assert merged.server.admin.token == "s3cret"
    assert (merged.server.host, merged.server.port) == (old.server.host, old.server.port)
    assert (merged.server.admin.host, merged.server.admin.port) == ("127.0.0.1", 8081)
    assert (merged.server.admin.allowed_hosts, merged.server.max_body_bytes) == (("gateway.svc",), 7)
    assert {each.path for each in differences(merged, new)} == {each.path for each in found if not each.applies}


@pytest.mark.parametrize("port", ["admin", "metrics"])
@pytest.mark.parametrize(("before", "after"), [({}, None), (None, {})])
def test_a_port_for_operators_comes_or_goes_at_a_restart(port: str, before: Any, after: Any) -> None:
    old, new = config(server={port: before}), config(server={port: after})
    assert [(each.path, each.applies) for each in differences(old, new)] == [(f"server.{port}", False)]
    assert applicable(old, new) == old


@pytest.mark.parametrize("before", [None, {}, {"token": "former"}])
def test_a_token_of_the_admin_port_is_never_shown(before: Any) -> None:
    old, new = config(server={"admin": before}), config(server={"admin": {"token": "s3cret"}})
    for one, other in ((old, new), (new, old)):
        (change,) = differences(one, other)
        assert "***" in repr(change)
        assert "s3cret" not in repr(change)
        assert "former" not in repr(change)


def test_a_reload_applies_once_and_lists_what_it_could_not() -> None:
    async def main() -> None:
        read, followed = [config(server={"max_body_bytes": 7, "port": 1})], list[Config]()

        async def apply(config: Config) -> None:
            assert reloads.config is not config
            followed.append(config)

        reloads = Reloads(config(), lambda: read[0], apply)
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

        async def apply(config: Config) -> None:
            followed.append(config)

        with pytest.raises(ConfigError, match="backends: is missing"):
            await Reloads(config(), load, apply).reload()
        assert followed == []

    asyncio.run(main())


async def test_a_file_is_watched_only_while_the_configuration_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.features.operate.reload._LOOK_SECONDS", 0.0)
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
