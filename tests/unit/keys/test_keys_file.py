"""The keys file: what it may have, and what is said of one that is wrong."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from gateway.config import ConfigError
from gateway.config.file import parse
from gateway.features.keys.keys_file import checked, read_keys
from gateway.features.keys.settings import KeyConfig

A, B = sha256(b"a").hexdigest(), sha256(b"b").hexdigest()


def keys_of(folder: Path, text: str, *configured: KeyConfig) -> tuple[KeyConfig, ...]:
    file = folder / "keys.yaml"
    file.write_text(text)
    return read_keys(file, configured)


def complaint(folder: Path, text: str, *configured: KeyConfig) -> str:
    with pytest.raises(ConfigError) as error:
        keys_of(folder, text, *configured)
    return str(error.value).replace(f"{folder}/", "")


def test_entries_are_those_of_the_configuration_as_yaml_or_json(tmp_path: Path) -> None:
    entries = [
        {"name": "ann", "key_sha256": A, "expires_at": "2027-01-31T00:00:00Z", "models": ["m"], "weight": 2},
        {"name": "bob", "key_sha256": B, "requests_per_minute": 5},
    ]
    keys = keys_of(tmp_path, json.dumps(entries))
    assert [key.name for key in keys] == ["ann", "bob"]
    unquoted = f"- name: ann\n  key_sha256: {A}\n  expires_at: 2027-01-31T00:00:00Z\n  models: [m]\n  weight: 2\n"
    assert keys_of(tmp_path, unquoted) == keys[:1]
    assert keys_of(tmp_path, "\ufeff" + unquoted) == keys[:1]
    assert keys_of(tmp_path, "[]") == ()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("- name: ann\n  key: sk-1\n", "keys.yaml:2: 0.key: must not be in this file in plain text"),
        (f"- name: ann\n  key_sha256: {A}\n  wieght: 2\n", "keys.yaml:3: 0.wieght: unknown key; did you mean weight?"),
        (f"- name: ann\n  key_sha256: {A}\n  expires_at: 2027\n", "keys.yaml:3: 0.expires_at: must be a time with its"),
        (f"- name: ann\n  key_sha256: {A}\n  expires_at: 2027-01-31\n", "keys.yaml:3: 0.expires_at: must be a time"),
        (f"- name: ann\n  key_sha256: {A}\n  expires_at: '1790000000'\n", "keys.yaml:3: 0.expires_at: must be a time"),
        (f"- name: ann\n  key_sha256: {A}\n  models: []\n", "keys.yaml:3: 0.models: "),
        (f"- name: ann\n  key_sha256: {A}\n  models: ['*-x']\n", "keys.yaml:1: 0: models may have a * only at the end"),
        (f"- name: ann\n  key_sha256: {A}\n- name: ann\n  key_sha256: {B}\n", "keys.yaml: duplicate key name 'ann'"),
        (
            f"- name: ann\n  key_sha256: {A}\n- name: bob\n  key_sha256: {A}\n",
            "keys.yaml: 'ann' and 'bob' are the same",
        ),
        ("keys: []\n", "keys.yaml: must be a list of keys"),
        ("- name: [\n", "keys.yaml:2: not valid YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, what: str) -> None:
    assert complaint(tmp_path, text).startswith(what)


def test_keys_conflict_with_those_of_the_configuration_and_with_earlier_secrets(tmp_path: Path) -> None:
    configured = KeyConfig(name="ann", key="a")
    entry = f"- name: bob\n  key_sha256: {A}\n"
    assert "'ann' and 'bob' are the same key" in complaint(tmp_path, entry, configured)
    rotated = f"- name: bob\n  key_sha256: {B}\n  previous: [{{key_sha256: {A}, expires_at: '2027-01-31T00:00:00Z'}}]\n"
    assert "'ann' and 'bob' are the same key" in complaint(tmp_path, rotated, configured)
    assert [key.name for key in keys_of(tmp_path, rotated)] == ["bob"]


def test_a_configuration_whose_keys_file_is_missing_names_the_command_that_makes_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    config = parse({"backends": [{"url": "http://a:1"}], "auth": {"keys_file": str(file)}})
    assert not config.auth.is_open
    with pytest.raises(ConfigError, match=f"gateway keys new NAME --file {file}"):
        checked(config)
    file.write_text("[]")
    assert checked(config) is config
