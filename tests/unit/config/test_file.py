"""Variables, files and flags."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import ConfigError
from gateway.config.file import load, substitute

ROOT = Path(__file__).resolve().parents[3]
BACKENDS = [{"url": "http://10.0.0.1:8000"}]


# Environment variables.


def test_variables_are_replaced_wherever_they_stand() -> None:
    document = {"a": "${X}", "b": ["${X}-${Y:-d}", {"c": "${Z:-}"}], "n": 5}
    assert substitute(document, {"X": "1x"}) == {"a": "1x", "b": ["1x-d", {"c": ""}], "n": 5}


def test_an_unset_variable_is_reported_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"backends\.0\.api_key: the environment variable KEY is not set"):
        substitute({"backends": [{"api_key": "${KEY}"}]}, {})


def test_an_empty_variable_counts_as_not_set() -> None:
    assert substitute("${X:-d}", {"X": ""}) == "d"


@given(st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="$"), min_size=1))
def test_a_variable_is_taken_literally_whatever_it_looks_like_in_yaml(value: str) -> None:
    assert substitute("${X}", {"X": value}) == value


@pytest.mark.parametrize("key", ["12345", "1e5", "0x1f", "yes", "null", "@key", "a: b", "[", "*x", "!y", "%z"])
def test_a_key_from_the_environment_may_look_like_anything(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("backends: [{url: 'http://a:1'}]\nauth: {keys: [{name: ann, key: '${KEY}'}]}\n")
    monkeypatch.setenv("KEY", key)
    assert load(file, []).auth.keys[0].key == key


def test_numbers_and_switches_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "backends: [{url: 'http://a:1', max_in_flight: '${N}'}, {url: 'http://b:1', max_in_flight: '${M:-auto}'}]\n"
        "server: {port: '${P:-9000}', access_log: '${LOG}'}\nadmission: {max_wait_seconds: '${W}'}\n"
    )
    for name, value in {"N": "32", "LOG": "false", "W": "1.5"}.items():
        monkeypatch.setenv(name, value)
    config = load(file, [])
    assert [backend.max_in_flight for backend in config.backends] == [32, "auto"]
    assert (config.server.port, config.server.access_log, config.admission.max_wait_seconds) == (9000, False, 1.5)


# Files and flags.


def test_flags_alone_need_no_file() -> None:
    config = load(None, ["http://a:1", "http://b:2"], host="127.0.0.1", port=0)
    assert [backend.name for backend in config.backends] == ["a:1", "b:2"]
    assert (config.server.host, config.server.port) == ("127.0.0.1", 0)


def test_flags_override_the_file_and_leave_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("backends: [{url: 'http://a:1'}]\nserver: {port: 1, max_body_bytes: 7}\n")
    config = load(file, ["http://b:2"], port=2)
    assert [backend.name for backend in config.backends] == ["b:2"]
    assert (config.server.port, config.server.max_body_bytes) == (2, 7)


def test_nothing_at_all_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="pass --backend"):
        load(None, [])


@pytest.mark.parametrize("text", ["a: [", "\t", "backends: !!python/object:os.system {}", "a: 1\n---\nb: 2", "\x00"])
def test_a_file_that_is_no_yaml_is_reported_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"gateway\.yaml"):
        load(file, [])


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("\ufeffbackends: [{url: http://a:1}]", encoding="utf-8")
    assert load(file, environ={}).backends[0].url == "http://a:1"
    file.write_text("backends: []", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"gateway\.yaml: 'utf-8' codec can't decode byte 0xff in position 0"):
        load(file, environ={})


def test_a_missing_file_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml", [])


@pytest.mark.parametrize("text", ["- 1", "5", "x"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="must be a mapping"):
        load(file, [])


@pytest.mark.parametrize("server", ["5", "[1]", "x"])
def test_a_section_of_the_wrong_kind_is_refused_though_a_flag_overrides_part_of_it(tmp_path: Path, server: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(f"backends: [{{url: 'http://a:1'}}]\nserver: {server}\n")
    with pytest.raises(ConfigError, match="server"):
        load(file, [], port=1)


@pytest.mark.parametrize("file", sorted((ROOT / "config").glob("*.yaml")), ids=lambda file: file.name)
def test_the_example_files_are_valid(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = yaml.safe_load(file.read_text())
    if isinstance(document, dict) and "backends" in document:
        assert load(file, []).backends


def test_mistakes_are_reported_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "backends:\n- url: http://a:1\n- url: http://b:1\n  colour: red\nserver:\n  port: 99999\nservr: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(file, [])
    assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == [
        f"{file}:{line}" for line in (6, 4, 7)
    ]
    with pytest.raises(ConfigError) as caught:
        load(file, ["ftp://nonsense"])
    assert f"{file}:7: servr: unknown key; did you mean server?" in str(caught.value).splitlines()


def complaints(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> list[str]:
    """What is said of a file, without its name."""
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file, environ=environ or {})
    return [line.removeprefix(f"{file}:") for line in str(caught.value).splitlines()]


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    text = (
        "backends:\n- {url: 'http://a:1', api_key: '${ONE}'}\nserver:\n  port: '${TWO}'\n  prot: 1\nport: 2\n"
        "models:\n  aliases: {a: '', b: c, c: d}\nauth:\n  keys:\n  - {name: x, key: k}\n  - {name: x, key: k2}\n"
        "  - {name: y, key: k}\nserver2: {}\nauth: {keys: [{name: x, key: k}, {name: x, key: k}]}\n"
    )
    assert sorted(complaints(tmp_path, text)) == sorted([
        "15: auth: duplicate key; it is in line 9, too",
        "2: backends.0.api_key: the environment variable ONE is not set and has no default",
        "4: server.port: the environment variable TWO is not set and has no default",
        "5: server.prot: unknown key; did you mean port?",
        "6: port: unknown key; did you mean server.port?",
        "8: models.aliases: 'a' is an alias of nothing; name a model",
        "8: models.aliases: 'b' is an alias of 'c', which is an alias itself; name a model",
        "9: auth: duplicate key name 'x'; key names must be unique",
        "14: server2: unknown key; did you mean server?",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("backend:\n- url: http://a:1\n", "1: backend: unknown key; did you mean backends?"),
        ("backends: [{url: 'http://a:1'}]\nserver: {port: 8081}\n",
         "2: server: port and admin.port are both 8081: change one of them"),
        ("backends:\n- {url: 'http://a:1', api_key: ${KEY}}\n",
         '2: ${KEY} needs quotes inside { } or [ ]: "${KEY}"'),
        ("backends: [{url: 'http://a:1'}]\nserver: {port: 99999}\n", "2: server.port: must be at most 65535"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_what_was_meant(tmp_path: Path, text: str, line: str) -> None:
    assert complaints(tmp_path, text) == [line]


def test_the_environment_alone_is_a_configuration_and_overrides_the_file(tmp_path: Path) -> None:
    environ = {
        "GATEWAY_BACKENDS": "a:1, http://b:2", "GATEWAY_API_KEYS": "team=sk-1,c2stMg==", "GATEWAY_SERVER__PORT": "9000",
        "GATEWAY_SERVER__ADMIN__PORT": "9001", "GATEWAY_ROUTING__POLICY": "round_robin", "GATEWAY_PURE": "1",
        "GATEWAY_PORT": "tcp://10.0.0.1:80", "GATEWAY_MODELS__ALIASES": "{x: Y}",
    }  # fmt: skip
    config = load(None, environ=environ)
    assert [backend.url for backend in config.backends] == ["http://a:1", "http://b:2"]
    assert [(key.name, key.key) for key in config.auth.keys] == [("team", "sk-1"), ("key-2", "c2stMg==")]
    assert config.server.admin is not None
    assert (config.server.port, config.server.admin.port, config.models.aliases) == (9000, 9001, {"x": "Y"})
    file = tmp_path / "gateway.yaml"
    file.write_text("backends: [{url: 'http://c:1'}]\nserver: {max_body_bytes: 7, port: 1}\n")
    config = load(file, port=5, api_keys=["k"], environ=environ)
    assert (config.server.port, config.server.max_body_bytes, len(config.backends)) == (5, 7, 2)
    assert [(key.name, key.key) for key in config.auth.keys] == [("key-1", "k")]


@pytest.mark.parametrize(("name", "value"), [("GATEWAY_SERVER__PROT", "1"), ("GATEWAY_SERVER__PORT", "[")])
def test_a_wrong_variable_of_the_environment_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"(PORT|prot): "):
        load(None, ["http://a:1"], environ={name: value})


def test_a_variable_without_a_value_is_the_only_mistake_of_its_key(tmp_path: Path) -> None:
    text = "backends: [{url: 'http://a:1'}]\nauth:\n  keys:\n    - {name: a, key: '${KEY}'}\n"
    assert complaints(tmp_path, text) == [
        "4: auth.keys.0.key: the environment variable KEY is not set and has no default"
    ]
