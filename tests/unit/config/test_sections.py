import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from gateway.config import Config, ConfigError
from gateway.config.file import parse
from gateway.core.backends.settings import BackendConfig, KvEventsConfig

ROOT = Path(__file__).resolve().parents[3]
BACKENDS = [{"url": "http://10.0.0.1:8000"}]


def with_section(section: str, **fields: Any) -> Config:
    return parse({"backends": BACKENDS, section: fields})


def test_a_backend_is_all_that_is_needed() -> None:
    config = parse({"backends": BACKENDS})
    assert config.backends[0].name == "10.0.0.1:8000"
    assert (config.server.port, config.routing.policy, config.admission.max_wait_seconds) == (8080, "prefix", 60.0)


@pytest.mark.parametrize("document", [{}, {"backends": []}, {"backends": None}, [], "x", None, 5])
def test_without_a_backend_there_is_no_configuration(document: Any) -> None:
    with pytest.raises(ConfigError):
        parse(document)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"servr": {}}, "servr: unknown key"),
        ({"server": {"prot": 1}}, "server.prot: unknown key"),
        ({"server": {"admin": {"x": 1}}}, "server.admin.x: unknown key"),
        ({"server": {"admin": {"token": "two words"}}}, "server.admin.token: "),
        ({"server": {"admin": {"open_paths": ["/admin/route"]}}}, "server.admin.open_paths.0: "),
        ({"server": {"metrics": {"token": "x"}}}, "server.metrics.token: unknown key"),
        ({"auth": {"keys": [{"name": "a", "key": "k", "wieght": 1}]}}, "auth.keys.0.wieght: unknown key"),
        ({"server": {"port": 70000}}, "server.port: "),
        ({"server": {"port": "x"}}, "server.port: "),
        ({"routing": {"policy": "random"}}, "routing.policy: "),
        ({"admission": {"kv_headroom": 1.5}}, "admission.kv_headroom: "),
        ({"admission": {"max_wait_seconds": 0}}, "admission.max_wait_seconds: "),
        ({"admission": {"tenant_header": "a b"}}, "admission.tenant_header: "),
        ({"admission": {"tenant_header": "Authorization"}}, "admission.tenant_header: "),
        ({"auth": {"keys": [{"name": "a", "key": "k", "weight": 0}]}}, "auth.keys.0.weight: "),
        ({"auth": {"keys": [{"name": "a", "key": "k", "priority": "high"}]}}, "auth.keys.0.priority: "),
        ({"health": {"fall": 0}}, "health.fall: "),
        ({"models": {"org/m.1": {"tokeniser": "x"}}}, "models.org/m.1.tokeniser: unknown key"),
        ({"models": {"org/m": "x"}}, "models.org/m: must be a mapping"),
        (
            {"models": {"aliases": {"gpt": "org/m"}, "gpt": {}}},
            "models: 'gpt' is an alias; use a section for 'org/m' instead",
        ),
        *(
            ({"models": {"aliases": {"gpt": target}}}, "models.aliases.gpt: must be a model, or models with weights")
            for target in (3, None, ["a"], {"a": "x"}, {"a": -1}, {"a": True}, {"a": float("nan")})
        ),
        ({"models": {"aliases": {"gpt": {}}}}, "models.aliases: 'gpt' is an alias of nothing; name a model"),
        ({"models": {"aliases": {"gpt": {"": 1}}}}, "models.aliases: 'gpt' is an alias of nothing; name a model"),
        ({"models": {"aliases": {"gpt": {"a": 0}}}}, "models.aliases: the weights of 'gpt' are all 0"),
        (
            {"models": {"aliases": {"gpt": {"a": 1, "b": 2}, "b": "c"}}},
            "models.aliases: 'gpt' is an alias of 'b', which is an alias itself; name a model",
        ),
        ({"models": {"m": {"fallbacks": ["n"]}}}, "models.m.fallbacks: unknown key; did you mean fallback?"),
        ({"models": {"m": {"lora": {"base": "n"}}}}, "models.m.lora.path: "),
        ({"models": {"m": {"lora": {"base": "", "path": "x"}}}}, "models.m.lora.base: "),
        (
            {"models": {"m": {"lora": {"base": "m", "path": "x"}}}},
            "models: the base 'm' of 'm' is an alias or an adapter itself; name a model",
        ),
        ({"models": {"m": {"fallback": "n"}}}, "models.m.fallback: must be a list"),
        ({"models": {"m": {"fallback": ["n", "n"]}}}, "models.m.fallback: 'n' is there twice; name it once"),
        ({"models": {"m": {"fallback": [""]}}}, "models.m.fallback: an entry is empty; name a model"),
        ({"models": {"m": {"fallback": ["m"]}}}, "models: the fallbacks 'm' -> 'm' are a loop; remove one of them"),
        (
            {"models": {"m": {"fallback": ["o", "n"]}, "n": {"fallback": ["p"]}, "p": {"fallback": ["m"]}}},
            "models: the fallbacks 'm' -> 'n' -> 'p' -> 'm' are a loop; remove one of them",
        ),
        (
            {"models": {"aliases": {"gpt": {"a": 1, "b": 2}}, "m": {"fallback": ["gpt"]}}},
            "models: the fallback 'gpt' of 'm' is an alias; name the model 'a' instead",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_key(document: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"backends": BACKENDS} | document)
    assert str(error.value).startswith(place)


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse({"backends": BACKENDS, "a": 1, "b": 2})
    assert str(error.value).splitlines() == ["a: unknown key", "b: unknown key"]


def test_a_url_without_a_scheme_is_http() -> None:
    assert BackendConfig(url="localhost:8000").url == "http://localhost:8000"


@pytest.mark.parametrize(
    "url",
    ["10.0.0.1:8000/v1", "ftp://a", "http://", "http://a/v1", "http://a?x=1", "http://a#x", "http://u:p@a", "http://a:99999",
     "http://a:x", "http://[::1", "http://a b", "http://a\r\nx: y", "", "http://127.0.0.1:0", "http://a..b",
     "http://" + "x" * 64 + ".example", "http://" + ".".join(["x" * 60] * 5), "http://-a", "http://a\0b",
     "http://b\u00fccher.example", "http://1.2.3.4:8\n0", "http://%41"],
)  # fmt: skip
def test_a_backend_url_is_scheme_host_and_port_alone(url: str) -> None:
    with pytest.raises(ConfigError, match=r"backends\.0"):
        parse({"backends": [{"url": url}]})


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://a:1/", "a:1"),
        ("https://a.b", "a.b"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("HTTP://A:1", "A:1"),
        ("http://my_pod-0.svc.", "my_pod-0.svc."),
    ],
)
def test_a_backend_is_named_after_its_url(url: str, name: str) -> None:
    backend = BackendConfig(url=url)
    assert backend.name == name
    assert not backend.url.endswith("/")


NUMBERS = [
    (section, key)
    for section, field in Config.model_fields.items()
    if isinstance(field.default, BaseModel)
    for key, kind in type(field.default).model_fields.items()
    if isinstance(kind.default, int | float) and not isinstance(kind.default, bool)
]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("section", "key"), NUMBERS)
def test_no_number_may_be_infinite_or_none(section: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{section}\.{key}: "):
        with_section(section, **{key: value})


@pytest.mark.parametrize(("section", "key"), [each for each in NUMBERS if each[1].endswith("_seconds")])
def test_no_time_is_longer_than_timers_can_be(section: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{section}\.{key}: .*100000000"):
        with_section(section, **{key: 1e30})


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ".", "a b", "-a", "a:1", "[::1]"])
def test_an_address_to_listen_on_is_one(host: str) -> None:
    for key, value in (("host", host), ("admin", {"host": host})):
        with pytest.raises(ConfigError, match=r"^server\.(admin\.)?host: .*is not a host name"):
            with_section("server", **{key: value})
    for fine in ("", "::", "0.0.0.0", "localhost", "fe80::1%eth0"):
        assert with_section("server", host=fine).server.host == fine


@pytest.mark.parametrize("name", ["a b", "a\nb", 'a"', "x" * 129, "ä"])
def test_a_name_may_not_break_headers_or_labels(name: str) -> None:
    with pytest.raises(ConfigError, match="may contain only letters"):
        parse({"backends": [{"url": "http://a:1", "name": name}]})


def test_two_backends_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"duplicate backend name '10\.0\.0\.1:8000'"):
        parse({"backends": BACKENDS * 2})


@pytest.mark.parametrize("value", [0, -1, "many", 1.5])
@pytest.mark.parametrize("field", ["max_in_flight", "kv_cache_tokens"])
def test_sizes_are_positive_or_auto(field: str, value: Any) -> None:
    assert parse({"backends": [BACKENDS[0] | {field: 1}]})
    assert parse({"backends": [BACKENDS[0] | {field: "auto"}]})
    with pytest.raises(ConfigError):
        parse({"backends": [BACKENDS[0] | {field: value}]})


KV_EVENTS_FORMS = "must be auto, off, or a mapping such as {endpoint: tcp://10.0.0.11:5557}"


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("on", f": {KV_EVENTS_FORMS}"),
        ("7", f": {KV_EVENTS_FORMS}"),
        ("null", f": {KV_EVENTS_FORMS}"),
        ("zmq", f": {KV_EVENTS_FORMS}"),
        ("{}", ".endpoint: is missing"),
        ("{endpoint: ipc:///tmp/kv}", ".endpoint: must look like tcp://host:port"),
        ("{endpoint: 'tcp://h:1/x'}", ".endpoint: must look like tcp://host:port"),
        ("{endpoint: 'tcp://h:1', replay: 'tcp://h:0'}", ".replay: the port must be a number from 1 to 65535"),
        (
            "{endpoint: 'tcp://h..h:1'}",
            ".endpoint: 'h..h' is not a host name (labels of 1 to 63 letters, digits, - or _; at most 253 in all)",
        ),
        ("{endpoint: 'tcp://h:1', replai: 'tcp://h:2'}", ".replai: unknown key; did you mean replay?"),
    ],
)
def test_a_wrong_value_of_kv_events_is_reported_once(written: str, complaint: str) -> None:
    document = yaml.safe_load(f"backends: [{{url: http://h:1, kv_events: {written}}}]")
    with pytest.raises(ConfigError) as error:
        parse(document)
    assert str(error.value) == f"backends.0.kv_events{complaint}"


@pytest.mark.parametrize("written", ["auto", "off", "'off'", "false"])
def test_kv_events_are_followed_unless_they_are_off(written: str) -> None:
    [backend] = parse(yaml.safe_load(f"backends: [{{url: http://h:1, kv_events: {written}}}]")).backends
    assert backend.kv_events == ("auto" if written == "auto" else "off")


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://10.0.0.1:1", "tcp://[fd00::1]:5557", "tcp://gpu-a.x:65535"]
)
def test_kv_event_endpoints_may_be_configured(endpoint: str) -> None:
    [backend] = parse({"backends": [{"url": "http://h:1", "kv_events": {"endpoint": endpoint}}]}).backends
    assert backend.kv_events == KvEventsConfig(endpoint=endpoint, replay=None, topic=None, bind=False)


@pytest.mark.parametrize("key", ["a\nb", "a b", "a\r\nx: y", "ä"])
def test_a_key_for_a_backend_may_not_break_its_header(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        parse({"backends": [BACKENDS[0] | {"api_key": key}]})


@pytest.mark.parametrize("form", [{}, {"key": "k", "key_sha256": "0" * 64}, {"key_sha256": "xyz"}, {"key": ""}])
def test_a_clients_key_comes_in_exactly_one_form(form: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"auth\.keys\.0"):
        with_section("auth", keys=[{"name": "ann"} | form])


def test_nothing_can_be_changed_afterwards() -> None:
    config = parse({"backends": BACKENDS})
    with pytest.raises(ValueError, match="frozen"):
        config.server.port = 1  # type: ignore[misc]


def test_a_model_has_a_section_of_its_own_beside_the_aliases() -> None:
    models = with_section("models", **{"aliases": {"gpt": "org/m"}, "org/m": {"tokenizer": "/models/m"}}).models
    assert models.aliases == {"gpt": "org/m"}
    assert {name: model.tokenizer for name, model in models.by_name.items()} == {"org/m": "/models/m"}
    assert with_section("models", aliases={"gpt": "org/m"}).models.by_name == {}


def test_all_models_that_the_file_names_are_expected() -> None:
    sections = {"aliases": {"gpt": "a", "canary": {"b": 1, "c": 0}}, "m": {"fallback": ["n"]}, "n": {"fallback": ["o"]}}
    config = with_section("models", **sections)
    assert config.named_models == set("abcmno")
    assert config.models.fallbacks == {"m": ("n",), "n": ("o",)}


def test_a_model_may_say_otherwise_whether_its_embeddings_share_batches() -> None:
    config = with_section("models", m={"embeddings": {"coalesce": False}}, n={"tokenizer": ""})
    assert [config.coalesces(name) for name in "mnx"] == [False, True, True]


def test_the_schema_has_the_keys_of_a_models_section() -> None:
    definitions = Config.model_json_schema()["$defs"]
    assert definitions["ModelsConfig"]["additionalProperties"] == {"$ref": "#/$defs/ModelConfig"}
    assert definitions["ModelConfig"]["additionalProperties"] is False
    assert "tokenizer" in definitions["ModelConfig"]["properties"]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ([{"name": "a", "key": "x"}, {"name": "a", "key": "y"}], "auth: duplicate key name 'a'"),
        ([{"name": "a", "key": "x"}, {"name": "b", "key": "x"}], "auth: 'a' and 'b' are the same key"),
        ([{"name": "a", "key": "x"}, {"name": "b", "key_sha256": sha256(b"x").hexdigest()}], "are the same key"),
        ([{"name": "a", "key_sha256": "0" * 64}], "auth.keys.0: key_sha256 is a placeholder"),
        ([{"name": "a", "key_sha256": sha256(b"").hexdigest()}], "auth.keys.0: key_sha256 is a placeholder"),
    ],
)
def test_keys_that_would_be_confused_or_open_to_everybody_are_refused(keys: list[Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parse({"backends": [{"url": "http://a"}], "auth": {"keys": keys}})
