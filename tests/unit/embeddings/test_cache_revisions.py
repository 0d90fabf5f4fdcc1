"""The state of a model has a new name whenever its vectors may be others."""

from dataclasses import replace
from random import Random

from gateway.backends.facts import Facts, ModelCard
from gateway.backends.fleet import Fleet
from gateway.backends.health import ProbeResult
from gateway.backends.settings import BackendConfig
from gateway.config import HealthConfig
from gateway.embeddings.cache import Revisions

CARD = ModelCard("m", root="org/m", max_model_len=512)


def scene(*cards: ModelCard) -> tuple[Fleet, Revisions]:
    configs = [BackendConfig(url=f"http://10.0.0.{number}:1", name=f"b{number}") for number in range(3)]
    fleet = Fleet(configs, HealthConfig(), clock=lambda: 0.0, random=Random(1))
    revisions = Revisions(fleet)
    fleet.on_restart.append(revisions.restarted)
    for backend, card in zip(fleet.backends, cards, strict=False):
        fleet.learned(backend, Facts(models=(card,), process_start_seconds=1.0))
        fleet.probed(backend, ProbeResult.OK)
    return fleet, revisions


def test_a_backend_that_joins_with_the_same_model_changes_nothing() -> None:
    fleet, revisions = scene(CARD)
    before = revisions.of("m")
    fleet.learned(fleet.backends[1], Facts(models=(CARD,)))
    assert revisions.of("m") == before


def test_one_that_joins_with_another_does_as_long_as_it_is_there() -> None:
    for other in (replace(CARD, root="org/m2"), replace(CARD, parent="base"), replace(CARD, max_model_len=256)):
        fleet, revisions = scene(CARD)
        before = revisions.of("m")
        fleet.learned(fleet.backends[1], Facts(models=(other,)))
        assert revisions.of("m") != before
        fleet.learned(fleet.backends[1], Facts())
        assert revisions.of("m") == before


def test_a_card_that_changes_does() -> None:
    fleet, revisions = scene(CARD)
    before = revisions.of("m")
    fleet.learned(fleet.backends[0], Facts(models=(replace(CARD, root="org/m2"),), process_start_seconds=1.0))
    assert revisions.of("m") != before


def test_a_restart_does_and_only_for_models_of_that_backend() -> None:
    fleet, revisions = scene(CARD, replace(CARD, id="other"))
    before, other = revisions.of("m"), revisions.of("other")
    fleet.learned(fleet.backends[0], replace(fleet.backends[0].facts, process_start_seconds=2.0))
    assert revisions.of("m") != before
    assert revisions.of("other") == other


def test_no_earlier_state_comes_back_when_a_backend_was_restarted_while_it_served_another_model() -> None:
    fleet, revisions = scene(CARD)
    before = revisions.of("m")
    fleet.learned(fleet.backends[0], Facts(models=(replace(CARD, id="x"),), process_start_seconds=1.0))
    fleet.learned(fleet.backends[0], Facts(models=(replace(CARD, id="x"),), process_start_seconds=2.0))
    fleet.learned(fleet.backends[0], Facts(models=(CARD,), process_start_seconds=2.0))
    assert revisions.of("m") != before


def test_names_that_only_clients_know_are_not_remembered() -> None:
    _, revisions = scene(CARD)
    for number in range(100):
        assert revisions.of(f"unknown {number}") == revisions.of("unknown")
    revisions.of("m")
    assert list(revisions._served_by) == ["m"]
