"""`gateway keys`: a key from its first day to its last, in a file that a gateway can follow."""

import json
import os
import stat
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from gateway.__main__ import app
from gateway.cli.key_store import KeysError, KeyStore, duration_of, expiry_of
from gateway.features.keys.keys_file import read_keys
from tests.unit.pages import serving

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)


def keys(*arguments: str | Path, environ: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["keys", *map(str, arguments)], env=environ)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def new(file: Path, name: str, *options: str) -> str:
    """The secret of a new key."""
    result = keys("new", name, "--file", file, *options)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def entries(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def test_a_new_key_is_printed_once_and_only_its_digest_is_stored(file: Path) -> None:
    secret = new(file, "ann")
    assert secret.startswith("sk-")
    assert len(secret) == 46
    assert entries(file) == [{"name": "ann", "key_sha256": digest(secret)}]
    assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert new(file, "bob") != secret


def test_all_options_are_stored(file: Path) -> None:
    options = "--models m,gpt-* --requests-per-minute 5 --tokens-per-minute 6 --max-concurrent 7 --tokens-per-day 8"
    options += " --tokens-per-month 9 --priority batch --isolate-cache --weight 2 --expires 2100-01-31"
    secret = new(file, "ann", *options.split())
    assert entries(file) == [
        {
            "name": "ann",
            "key_sha256": digest(secret),
            "expires_at": "2100-01-31T00:00:00Z",
            "models": ["m", "gpt-*"],
            "isolate_cache": True,
            "weight": 2.0,
            "priority": "batch",
            "requests_per_minute": 5,
            "tokens_per_minute": 6,
            "max_concurrent_requests": 7,
            "tokens_per_day": 8,
            "tokens_per_month": 9,
        }
    ]


def test_a_file_in_json_stays_one(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    new(file, "ann")
    new(file, "bob")
    assert [each["name"] for each in json.loads(file.read_text())] == ["ann", "bob"]


def test_a_rotated_key_has_both_secrets_until_the_grace_is_over(file: Path) -> None:
    first = new(file, "ann", "--requests-per-minute", "5")
    before = datetime.now(UTC)
    second = keys("rotate", "ann", "--file", file, "--grace", "2h").stdout.strip()
    key = read_keys(file)[0]
    assert (key.name, key.requests_per_minute, key.key_sha256) == ("ann", 5, digest(second))
    assert [each.key_sha256 for each in key.previous] == [digest(first)]
    assert timedelta(hours=2, seconds=-1) <= key.previous[0].expires_at - before < timedelta(hours=2, minutes=1)
    third = keys("rotate", "ann", "--file", file, "--grace", "0").stdout.strip()
    key = read_keys(file)[0]
    assert key.key_sha256 == digest(third)
    assert [each.key_sha256 for each in key.previous] == [digest(first)]  # the second one is invalid at once


def test_earlier_secrets_that_have_expired_are_dropped(file: Path) -> None:
    new(file, "ann")
    store = KeyStore(file)
    for days in range(3):
        store.rotate("ann", timedelta(hours=24), NOW + timedelta(days=2 * days), None)
    assert len(read_keys(file)[0].previous) == 1


def test_a_key_that_has_expired_is_rotated_with_another_expiry_only(file: Path) -> None:
    file.write_text(f"- {{name: ann, key_sha256: {digest('a')}, expires_at: '2020-01-01T00:00:00Z'}}\n")
    refused = keys("rotate", "ann", "--file", file)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "ann expired at 2020-01-01T00:00:00+00:00: pass --expires as well" in refused.stderr
    assert keys("rotate", "ann", "--file", file, "--expires", "never", "--grace", "0").exit_code == 0
    assert list(entries(file)[0]) == ["name", "key_sha256"]


def test_a_revoked_key_is_gone(file: Path) -> None:
    new(file, "ann")
    new(file, "bob")
    assert keys("revoke", "ann", "--file", file).exit_code == 0
    assert [each["name"] for each in entries(file)] == ["bob"]
    again = keys("revoke", "ann", "--file", file)
    assert (again.exit_code, again.stderr) == (1, f"gateway: there is no key 'ann' in {file}\n")


def test_the_list_shows_no_secrets(file: Path) -> None:
    assert "`gateway keys new NAME` adds one" in keys("list", "--file", file).stdout
    new(file, "ann", "--expires", "2100-01-31", "--requests-per-minute", "1000")
    keys("rotate", "ann", "--file", file)
    page = keys("list", "--file", file).stdout
    assert "ann" in page
    assert "2100-01-31" in page
    shown = keys("list", "--file", file, "--json").stdout
    key = json.loads(shown)["keys"][0]
    assert (key["expired"], key["limits"]) == (False, ["1,000 requests/min"])
    assert key["previous_valid_until"] > datetime.now(UTC).isoformat()
    for text in (page, shown):
        assert entries(file)[0]["key_sha256"][:8] not in text


def test_the_list_shows_when_a_gateway_last_saw_each_key(file: Path) -> None:
    new(file, "ann")
    new(file, "bob")
    used = json.dumps({"rows": [], "last_used": {"ann": "2026-11-25", "revoked": "2026-11-24"}}).encode()
    with serving(lambda _: (200, used)) as url:
        lines = keys("list", "--file", file, "--admin", url).stdout.splitlines()
        shown = json.loads(keys("list", "--file", file, "--admin", url, "--json").stdout)["keys"]
    assert lines[0].endswith("last used (UTC)")
    assert [line.split()[-1] for line in lines[1:]] == ["2026-11-25", "-"]
    assert [key["last_used"] for key in shown] == ["2026-11-25", None]
    assert "last used" not in keys("list", "--file", file).stdout


def test_the_file_is_found_by_the_configuration_whose_variables_need_no_values(tmp_path: Path, file: Path) -> None:
    config = tmp_path / "gateway.yaml"
    auth = {"keys_file": str(file), "keys": [{"name": "ann", "key": "${ANNS_KEY}"}]}
    config.write_text(yaml.safe_dump({"auth": auth, "backends": [{"url": "${NOT_SET}"}]}))
    assert keys("new", "bob", "-c", config).exit_code == 0
    assert [each["name"] for each in entries(file)] == ["bob"]
    assert "there is a key 'ann' already" in keys("new", "ann", "-c", config).stderr
    assert "it is in the configuration" in keys("revoke", "ann", "-c", config).stderr
    by_environment = keys("list", environ={"GATEWAY_AUTH__KEYS_FILE": str(file)})
    assert "bob" in by_environment.stdout
    assert "Pass --file FILE, or -c FILE" in keys("list").stderr
    config.write_text("auth: 5\n")
    assert f"`gateway check -c {config}`" in keys("list", "-c", config).stderr


def test_an_invalid_file_or_option_changes_nothing(file: Path) -> None:
    file.write_text("- name: ann\n  key: plain\n")
    refused = keys("new", "bob", "--file", file)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert f"{file}:2: 0.key: " in refused.stderr
    assert file.read_text() == "- name: ann\n  key: plain\n"
    file.unlink()
    for options, code, what in (
        (["--models", ""], 2, "models"),
        (["--models", "*a"], 2, "only at the end"),
        (["--expires", "soon"], 1, "'soon' is no expiry"),
        (["--expires", "2020-01-01"], 1, "2020-01-01 has passed"),
        (["--expires", "2100-01-01T00:00:00"], 1, "has no time zone"),
    ):
        refused = keys("new", "bob", "--file", file, *options)
        assert (refused.exit_code, refused.stdout) == (code, ""), options
        assert what in refused.stderr
    assert not file.exists()
    nowhere = keys("new", "bob", "--file", file / "keys.yaml")
    assert (nowhere.exit_code, "cannot write" in nowhere.stderr) == (1, True)


def test_commands_at_once_lose_no_key(file: Path) -> None:
    names = [f"key-{number}" for number in range(12)]
    threads = [Thread(target=KeyStore(file).add, args=({"name": name},)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each["name"] for each in entries(file)) == sorted(names)
    assert sorted(each.name for each in file.parent.iterdir()) == [".keys.yaml.lock", "keys.yaml"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_the_owner_of_the_file_stays_the_same(file: Path) -> None:
    file.write_text("")
    os.chown(file, 12345, 23456)
    new(file, "ann")
    status = file.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (12345, 23456, 0o600)


def test_a_link_stays_a_link(tmp_path: Path, file: Path) -> None:
    (tmp_path / "real").mkdir()
    file.symlink_to("real/keys.yaml")
    new(file, "ann")
    new(file, "bob")
    assert file.is_symlink()
    assert len(entries(tmp_path / "real" / "keys.yaml")) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90d", datetime(2027, 2, 24, 12, tzinfo=UTC)),
        ("30m", datetime(2026, 11, 26, 12, 30, tzinfo=UTC)),
        ("2027-01-31", datetime(2027, 1, 31, tzinfo=UTC)),
        ("2027-01-31T12:00:00Z", datetime(2027, 1, 31, 12, tzinfo=UTC)),
        ("2027-01-31T12:00:00+02:00", datetime(2027, 1, 31, 10, tzinfo=UTC)),
        ("never", None),
    ],
)
def test_an_expiry_is_a_duration_a_date_a_time_or_never(text: str, expected: datetime | None) -> None:
    assert expiry_of(text, NOW) == expected


@pytest.mark.parametrize("text", ["", "d", "-1d", "1.5h", "1y", "999999999w", "24"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(KeysError):
        duration_of(text)
    with pytest.raises(KeysError):
        expiry_of(text, NOW)
