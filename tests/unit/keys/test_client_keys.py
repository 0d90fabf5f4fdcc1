"""The keys in effect: those of the configuration and of a file that changes."""

import asyncio
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from gateway.config import ConfigError
from gateway.features.keys.client_keys import ClientKeys
from gateway.features.keys.keys_file import read_keys
from gateway.features.keys.settings import AuthConfig, KeyConfig


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with patch("gateway.features.keys.client_keys._LOOK_SECONDS", 0.0):
        yield


class Scene:
    """A keys file, and the keys in effect at each change."""

    def __init__(self, file: Path, *names: str, **auth: Any) -> None:
        self.file = file
        self.changes: list[list[str]] = []
        self.write(*names)
        self.keys = ClientKeys(self.auth(**auth), lambda: self.changes.append(self.keys.names))

    def auth(self, **auth: Any) -> AuthConfig:
        return AuthConfig.model_validate({"keys_file": str(self.file), **auth})

    def write(self, *names: str) -> None:
        """Replace the file, as an editor or `gateway keys` does."""
        new = self.file.with_suffix(".new")
        new.write_text(
            "".join(f"- {{name: {each}, key_sha256: {sha256(each.encode()).hexdigest()}}}\n" for each in names) or "[]"
        )
        new.replace(self.file)


async def test_keys_of_the_configuration_and_of_the_file_are_in_effect_together(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "keys.yaml", "bob", keys=[{"name": "ann", "key": "sk-a"}])
    assert (scene.keys.names, scene.keys.are_needed) == (["ann", "bob"], True)
    await scene.keys.step()
    assert scene.changes == []


async def test_a_change_of_the_file_applies_and_is_logged_without_secrets(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "keys.yaml", "ann", "bob")
    scene.write("bob", "carol")
    with capture_logs() as logs:
        await scene.keys.step()
    assert scene.changes == [["bob", "carol"]]
    assert [(each["added"], each["removed"], each["changed"]) for each in logs] == [(["carol"], ["ann"], [])]
    scene.write("bob", "carol")
    await scene.keys.step()
    assert len(scene.changes) == 1


async def test_an_invalid_or_missing_file_keeps_the_keys_and_is_logged_once_for_each_reason(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "keys.yaml", "ann")
    scene.file.write_text("- name: ann\n  key: sk-plain\n")
    with capture_logs() as logs:
        for _ in range(3):
            await scene.keys.step()
        scene.file.unlink()
        for _ in range(3):
            await scene.keys.step()
    assert [each["reasons"][0].split(": ")[0] for each in logs] == [f"{scene.file}:2", str(scene.file)]
    assert "sk-plain" not in str(logs)
    assert (scene.keys.names, scene.changes) == (["ann"], [])
    scene.write("bob")
    await scene.keys.step()
    assert scene.changes == [["bob"]]


@pytest.mark.parametrize("text", ["", "# gone\n", "null\n"])
async def test_a_file_that_lost_its_content_revokes_no_key(text: str, tmp_path: Path) -> None:
    """As of a writer that truncates first, or a full disk."""
    scene = Scene(tmp_path / "keys.yaml", "ann")
    with capture_logs() as logs:
        scene.file.write_text(text)
        await scene.keys.step()
    assert (scene.keys.names, scene.changes) == (["ann"], [])
    assert "write []" in logs[0]["reasons"][0]
    scene.write()
    await scene.keys.step()
    assert scene.keys.names == []


async def test_an_empty_list_admits_no_client(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "keys.yaml")
    assert (scene.keys.names, scene.keys.are_needed) == ([], True)
    assert not ClientKeys(AuthConfig(), lambda: None).are_needed


def test_a_file_that_is_invalid_at_the_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("- name: [\n")
    with pytest.raises(ConfigError, match=r"keys.yaml:2"):
        ClientKeys(AuthConfig(keys_file=str(tmp_path / "keys.yaml")), lambda: None)


async def test_a_mounted_secret_is_seen_when_kubernetes_swaps_its_folder(tmp_path: Path) -> None:
    for number, name in enumerate(("ann", "bob")):
        (tmp_path / f"..{number}").mkdir()
        Scene(tmp_path / f"..{number}" / "keys.yaml", name)
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    changes: list[list[str]] = []
    keys = ClientKeys(AuthConfig(keys_file=str(tmp_path / "keys.yaml")), lambda: changes.append(keys.names))
    assert keys.names == ["ann"]
    (tmp_path / "..new").symlink_to("..1")
    (tmp_path / "..new").replace(tmp_path / "..data")
    await keys.step()
    assert changes == [["bob"]]


async def test_a_reload_brings_another_file_or_none(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "keys.yaml", "ann")
    other = Scene(tmp_path / "other.yaml", "bob")
    scene.keys.apply(other.auth(keys=[{"name": "carol", "key": "sk-c"}]))
    assert scene.keys.names == ["carol", "bob"]
    with capture_logs() as logs:
        scene.keys.apply(AuthConfig(keys_file=str(tmp_path / "missing.yaml")))
    assert (scene.keys.names, len(logs)) == (["bob"], 1)
    scene.keys.apply(AuthConfig())
    assert (scene.keys.names, scene.keys.are_needed) == ([], False)
    await scene.keys.step()


async def test_a_reload_takes_what_a_thread_has_read_ahead(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "keys.yaml", "ann")
    auth = Scene(tmp_path / "other.yaml", "bob").auth()
    await asyncio.to_thread(scene.keys.read_ahead, auth)
    with patch("gateway.features.keys.client_keys.read_keys", side_effect=AssertionError("read on the event loop")):
        scene.keys.apply(auth)
    assert scene.keys.names == ["bob"]
    await scene.keys.step()
    assert (scene.keys.names, scene.changes) == (["bob"], [])


async def test_a_change_that_is_read_during_a_reload_is_not_lost(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "keys.yaml", "ann")
    begun, may_end = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> tuple[KeyConfig, ...]:
        begun.set()
        may_end.wait()
        return read_keys(*arguments)

    scene.write("bob")
    with patch("gateway.features.keys.client_keys.read_keys", slowly):
        step = asyncio.create_task(scene.keys.step())
        await asyncio.to_thread(begun.wait)
        scene.keys.apply(scene.auth())
        may_end.set()
        await step
    await scene.keys.step()
    assert (scene.keys.names, scene.changes) == (["bob"], [["bob"]])
