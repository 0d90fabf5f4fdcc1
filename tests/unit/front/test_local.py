from collections.abc import Mapping
from random import Random
from types import MappingProxyType

import orjson
import pytest

from gateway.config import HealthConfig
from gateway.core.backends.facts import ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import Draining, ModelNotFound, NoBackend
from gateway.core.front.handler import answer_local, explain
from gateway.features.keys.settings import KeyConfig
from tests.routes import find_route
from tests.unit.front.wires import FakeWire, fleet_of, reply_on

FLEET = fleet_of(ModelCard("org/m", raw={"created": 7, "owned_by": "us"}), ModelCard("n"))


def answer(
    path: bytes,
    fleet: Fleet = FLEET,
    draining: bool = False,
    aliases: Mapping[str, str] = MappingProxyType({}),
    key: KeyConfig | None = None,
) -> FakeWire:
    wire = FakeWire()
    answer_local(find_route(b"GET", path), path, key, fleet, aliases, draining, reply_on(wire))
    return wire


def test_it_is_alive_whatever_the_backends_do() -> None:
    assert answer(b"/livez", fleet_of(up=False), draining=True).status == 200


@pytest.mark.parametrize("path", [b"/readyz", b"/health"])
def test_it_is_ready_when_a_backend_can_serve(path: bytes) -> None:
    assert answer(path).body == b'{"status":"ready"}'
    with pytest.raises(NoBackend):
        answer(path, fleet_of(up=False))
    with pytest.raises(Draining):
        answer(path, draining=True)


def test_the_models_are_those_of_the_backends_with_their_cards() -> None:
    document = orjson.loads(answer(b"/v1/models").body)
    assert document["object"] == "list"
    assert document["data"] == [
        {"object": "model", "owned_by": "us", "created": 7, "id": "org/m"},
        {"object": "model", "owned_by": "vllm", "id": "n"},
    ]


@pytest.mark.parametrize("path", [b"/v1/models/org/m", b"/v1/models/org%2Fm", b"/v1/models/org/m?x=\xff"])
def test_a_model_is_found_in_any_spelling_of_its_name(path: bytes) -> None:
    assert orjson.loads(answer(path).body)["id"] == "org/m"


@pytest.mark.parametrize("path", [b"/v1/models/x", b"/v1/models/%FF", b"/v1/models/%"])
def test_an_unknown_model_is_not_found(path: bytes) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        answer(path)


def test_a_key_sees_only_the_models_that_it_may_use_by_the_names_that_clients_use() -> None:
    key = KeyConfig(name="ann", key="k", models=("gpt*", "n"))
    aliases = {"gpt-4": ("org/m",)}
    listed = orjson.loads(answer(b"/v1/models", aliases=aliases, key=key).body)["data"]
    assert [card["id"] for card in listed] == ["n", "gpt-4"]
    assert orjson.loads(answer(b"/v1/models/gpt-4", aliases=aliases, key=key).body)["id"] == "gpt-4"
    with pytest.raises(ModelNotFound):
        answer(b"/v1/models/org/m", aliases=aliases, key=key)
    error = ModelNotFound.of("gpt-5")
    explain(error, FLEET, aliases, key)
    assert error.message.endswith("Available models: n, gpt-4.")


def explained(error: ModelNotFound | NoBackend, fleet: Fleet) -> str:
    explain(error, fleet, {"gpt": "n"})
    return error.message


def test_an_unknown_model_is_answered_with_those_there_are() -> None:
    assert explained(ModelNotFound.of("org/n"), FLEET) == (
        "The model 'org/n' does not exist. Did you mean 'org/m'? Available models: org/m, n, gpt."
    )
    many = fleet_of(*[ModelCard(f"model-{number}") for number in range(12)])
    assert explained(ModelNotFound.of("x" * 1000), many).endswith("model-9 and 2 more (GET /v1/models).")
    assert len(explained(ModelNotFound.of("x" * 100000), many)) < 500


def test_a_backend_whose_models_are_not_known_is_named_with_the_reason() -> None:
    fleet = Fleet(
        [BackendConfig(url="http://10.0.0.7:8000", name="b")], HealthConfig(), clock=lambda: 1.0, random=Random(1)
    )
    fleet.probed(fleet.backends[0], ProbeResult.DNS, "host name not resolved: name or service not known")
    reason = "b: host name not resolved: name or service not known."
    assert explained(ModelNotFound.of("m"), fleet).endswith(f"The models of other backends are not known yet: {reason}")
    assert explained(NoBackend.of("m", "within 60 s"), fleet) == (
        f"No backend for model 'm' was ready within 60 s. {reason}"
    )


def test_an_alias_is_listed_with_the_card_of_its_model_if_that_is_there() -> None:
    aliases = {"gpt": "n", "gone": "x", "n": "org/m"}
    listed = orjson.loads(answer(b"/v1/models", aliases=aliases).body)["data"]
    assert [card["id"] for card in listed] == ["org/m", "n", "gpt"]
    assert orjson.loads(answer(b"/v1/models/gpt", aliases=aliases).body) == {
        "object": "model", "owned_by": "vllm", "id": "gpt"
    }  # fmt: skip
