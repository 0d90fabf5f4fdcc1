"""Every arm is the same gateway but for its policy, or a router as it is."""

from pathlib import Path

import pytest

from gateway import config
from gateway.config import file as config_file
from loadtest.servers.engines import EngineOptions
from tests.bench.place import Place, Ports
from tests.bench.routing.arms import POLICIES, arms, ours

ENGINES = EngineOptions(count=3, max_num_seqs=32)
PORTS = Ports(proxy=8100, metrics=8700, engines=(9200, 9201, 9202))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gateway_is_given_its_policy_its_caps_and_nothing_else(policy: str) -> None:
    found = config_file.parse(ours(policy).sections(PORTS.backends, ENGINES))
    assert found.routing == config.RoutingConfig.model_validate({"policy": policy})
    assert [backend.url for backend in found.backends] == PORTS.backends
    assert {(backend.max_in_flight, backend.relative_cost) for backend in found.backends} == {(32, 1.0)}
    assert (found.models.by_name, {backend.kv_events for backend in found.backends}) == ({}, {"off"})
    assert found.server.access_log
    assert (found.admission, found.health) == (config.AdmissionConfig(), config.HealthConfig())


def test_one_that_is_told_gets_the_speeds_of_its_backends() -> None:
    found = config_file.parse(ours("prefix", (1.0, 1.0, 2.5)).sections(PORTS.backends, ENGINES))
    assert [backend.relative_cost for backend in found.backends] == [1.0, 1.0, 2.5]


def test_the_configuration_is_written_where_the_command_reads_it(tmp_path: Path) -> None:
    *_, file = ours("round_robin").server(Place(tmp_path), PORTS, ENGINES).launch.command
    assert config_file.load(Path(file), []).routing.policy == "round_robin"


def test_routers_that_are_not_installed_are_left_out_and_named(tmp_path: Path) -> None:
    place = Place(tmp_path)
    found, missing = arms(place, [], ENGINES)
    assert [arm.name for arm in found] == [f"gateway-{policy}" for policy in POLICIES]
    assert missing == ["sglang-router", "vllm-router", "smg"]
    program = place.peers / "smg" / "bin" / "smg"
    program.parent.mkdir(parents=True)
    program.touch()
    found, missing = arms(place, ["smg", "gateway-prefix"], ENGINES)
    assert ([arm.name for arm in found], missing) == (["smg", "gateway-prefix"], [])
    assert "--policy cache_aware" in " ".join(found[0].server(place, PORTS, ENGINES).launch.command)


def test_of_unequal_engines_one_arm_is_told_and_the_others_are_not(tmp_path: Path) -> None:
    found, _ = arms(Place(tmp_path), [], EngineOptions(count=2, slow=2.5))
    assert {arm.label: arm.speeds for arm in found if arm.policy == "prefix"} == {
        "gateway, prefix": (),
        "gateway, prefix (told)": (1.0, 2.5),
    }


def test_where_engines_publish_kv_events_one_arm_follows_them_and_makes_tokens_itself(tmp_path: Path) -> None:
    engines = EngineOptions(kv_events=True, model_dir=Path("models/small"))
    found, _ = arms(Place(tmp_path), [], engines)
    [follows] = [arm for arm in found if arm.follows_events]
    told = config_file.parse(follows.sections(PORTS.backends, engines))
    assert {backend.kv_events for backend in told.backends} == {"auto"}
    assert told.models.by_name["small"].tokenizer.endswith("/models/small")
    assert follows.label == "gateway, prefix + KV events"
    assert [arm.name for arm in found if arm.predicts] == ["gateway-prefix", "gateway-events"]


def test_unknown_arms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no arm nginx"):
        arms(Place(tmp_path), ["nginx"], ENGINES)
