import math
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.config import HealthConfig
from gateway.core.backends.health import JITTER, Blame, Health, ProbeResult

from .conftest import peers

CONFIG = HealthConfig()
NO_PEERS: list[Blame] = []
BUSY_PEERS = peers(1000.0, 1000.0)  # they have served and failed just now


def make(**changes: float) -> Health:
    return Health(HealthConfig.model_validate(changes), Random(7))


def up(**changes: float) -> Health:
    health = make(**changes)
    health.probed(ProbeResult.OK, 0.0)
    assert health.state == "up"
    return health


def eject(health: Health, now: float, fatal: bool = False) -> float:
    """Fail until ejected; how long the ejection lasts."""
    while health.state != "ejected":
        health.failed(now, fatal=fatal)
    return health.ejected_until - now


def test_one_good_probe_brings_up_a_backend_that_was_never_up() -> None:
    health = make()
    health.probed(ProbeResult.REFUSED, 0.0)
    assert health.state == "down"
    health.probed(ProbeResult.OK, 1.0)
    assert health.state == "up"


def test_only_fall_bad_probes_in_a_row_take_it_down() -> None:
    health = up()
    for now in (2.0, 4.0):
        health.probed(ProbeResult.UNWELL, now)
    health.probed(ProbeResult.OK, 6.0)
    for now in (8.0, 10.0):
        health.probed(ProbeResult.UNWELL, now)
        assert health.state == "up"
    health.probed(ProbeResult.UNWELL, 12.0)
    assert health.state == "down"


def test_only_rise_good_probes_in_a_row_bring_it_back() -> None:
    health = up()
    for now in range(3):
        health.probed(ProbeResult.TIMEOUT, 10.0 + now)
    health.probed(ProbeResult.OK, 20.0)
    health.probed(ProbeResult.TIMEOUT, 22.0)
    health.probed(ProbeResult.OK, 24.0)
    assert health.state == "down"
    health.probed(ProbeResult.OK, 26.0)
    assert health.state == "up"


def test_flowing_tokens_overrule_probes_that_time_out() -> None:
    health = up()
    for second in range(2, 60, 2):
        health.heard_at = second - 1.0
        health.probed(ProbeResult.TIMEOUT, float(second))
        assert health.state == "up"
    health.probed(ProbeResult.TIMEOUT, 62.0)
    assert health.state == "up"
    health.probed(ProbeResult.TIMEOUT, 64.0)
    assert health.state == "down"


def test_a_probe_that_times_out_in_silence_is_late_until_something_is_heard() -> None:
    health = up()
    health.heard_at = 3.0
    health.probed(ProbeResult.TIMEOUT, 4.0)
    assert not health.late
    health.probed(ProbeResult.TIMEOUT, 6.0)
    assert (health.late, health.state) == (True, "up")
    health.succeeded(7.0)
    assert not health.late
    health.probed(ProbeResult.TIMEOUT, 10.0)
    assert health.late
    health.probed(ProbeResult.OK, 12.0)
    assert not health.late


def test_flowing_tokens_do_not_overrule_a_refused_connection_nor_an_unwell_engine() -> None:
    for probe in (ProbeResult.REFUSED, ProbeResult.UNWELL):
        health = up()
        for second in (2.0, 4.0, 6.0):
            health.succeeded(second - 0.1)
            health.probed(probe, second)
        assert health.state == "down"


def test_consecutive_failures_eject_and_a_success_between_starts_the_count_again() -> None:
    health = up()
    for _ in range(CONFIG.eject_failures - 1):
        health.failed(1.0)
    health.succeeded(1.0)
    for _ in range(CONFIG.eject_failures - 1):
        health.failed(1.0)
    assert health.state == "up"
    health.failed(1.0)
    assert health.state == "ejected"


def test_a_dead_engine_is_ejected_at_once() -> None:
    health = up()
    health.failed(1.0, fatal=True)
    assert health.state == "ejected"


def test_an_ejection_ends_by_time() -> None:
    health = up()
    seconds = eject(health, 1.0)
    assert CONFIG.eject_base_seconds * (1 - JITTER) <= seconds <= CONFIG.eject_base_seconds * (1 + JITTER)
    health.tick(1.0 + seconds - 0.01)
    assert health.state == "ejected"
    health.tick(1.0 + seconds)
    assert health.state == "up"


def test_a_good_probe_ends_an_ejection_in_its_second_half_only() -> None:
    health = up()
    seconds = eject(health, 10.0)
    health.probed(ProbeResult.OK, 10.0 + seconds * 0.4)
    assert health.state == "ejected"
    health.probed(ProbeResult.OK, 10.0 + seconds * 0.6)
    assert health.state == "up"


def test_a_good_probe_does_not_end_the_ejection_of_a_dead_engine() -> None:
    health = up()
    seconds = eject(health, 10.0, fatal=True)
    health.probed(ProbeResult.OK, 10.0 + seconds * 0.9)
    assert health.state == "ejected"


def test_each_relapse_doubles_the_ejection_up_to_the_most() -> None:
    health = up()
    now, lengths = 1.0, []
    for _ in range(7):
        seconds = eject(health, now)
        lengths.append(seconds)
        now += seconds
        health.tick(now)
    wanted = [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    for length, want in zip(lengths, wanted, strict=True):
        assert want * (1 - JITTER) <= length <= want * (1 + JITTER)


def test_one_failure_on_probation_ejects_again() -> None:
    health = up()
    now = 1.0 + eject(health, 1.0)
    health.tick(now)
    health.failed(now)
    assert health.state == "ejected"


def test_one_success_ends_the_probation() -> None:
    health = up()
    now = 1.0 + eject(health, 1.0)
    health.tick(now)
    health.succeeded(now)
    health.failed(now)
    assert health.state == "up"


def test_doublings_are_forgotten_one_by_one_while_it_works() -> None:
    health = up()
    now = 1.0
    for _ in range(3):
        now += eject(health, now)
        health.tick(now)
    health.succeeded(now)
    assert 10 * (1 - JITTER) <= eject(health, now + 2.5 * CONFIG.eject_max_seconds) <= 10 * (1 + JITTER)


def test_failures_of_requests_that_ran_when_it_was_ejected_do_not_prolong_the_ejection() -> None:
    health = up()
    eject(health, 1.0)
    until = health.ejected_until
    for _ in range(50):
        health.failed(2.0)
    assert health.ejected_until == until


def test_a_restart_ends_an_ejection() -> None:
    health = up()
    eject(health, 1.0, fatal=True)
    health.restarted()
    assert health.state == "up"


def test_error_answers_of_one_tenant_eject_nothing_while_another_is_served() -> None:
    health = up()
    for tenth in range(600):
        now = 1.0 + tenth / 10
        health.erred(now, "poison", BUSY_PEERS)
        if tenth % 100 == 0:
            health.succeeded(now, "other")
        assert health.state == "up"


def test_error_answers_of_two_tenants_eject_as_fast_as_any_failures() -> None:
    health = up()
    health.succeeded(1.0, "a")
    for tenant in "aaab":
        health.erred(1.0, tenant, BUSY_PEERS)
    assert health.state == "up"
    health.erred(1.0, "a", BUSY_PEERS)
    assert health.state == "ejected"


def test_a_backend_that_stands_out_is_ejected_at_once_whoever_asks() -> None:
    health = up()
    for _ in range(CONFIG.eject_failures):
        assert health.state == "up"
        health.erred(1.0, "", peers(0.9, -math.inf))
    assert health.state == "ejected"


def test_of_several_that_fail_one_tenant_each_is_ejected_when_probes_would_take_it_down() -> None:
    health, now = up(), 1.0
    while health.state == "up":
        now += 0.5
        health.erred(now, "", peers(now, now))
    assert now - 1.5 == CONFIG.probe_interval_seconds * CONFIG.fall


def test_on_probation_error_answers_of_one_tenant_eject_only_a_backend_that_stands_out() -> None:
    health = up()
    now = 1.0 + eject(health, 1.0)
    health.tick(now)
    health.erred(now, "poison", BUSY_PEERS)
    assert health.state == "up"
    health.erred(now, "poison", peers(now, -math.inf))
    assert health.state == "ejected"


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens, in any order, these hold."""

    def __init__(self) -> None:
        super().__init__()
        self.health = Health(CONFIG, Random(3))
        self.now = 0.0
        self.bad_in_a_row = 0
        self.good_in_a_row = 0
        self.failures_in_a_row = 0
        self.tenants_that_fail: set[str] = set()  # since the last request that was served

    @rule(seconds=st.floats(0.0, 90.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.health.tick(self.now)

    @rule(probe=st.sampled_from(ProbeResult))
    def probe(self, probe: ProbeResult) -> None:
        before = self.health.state
        self.health.probed(probe, self.now)
        good = probe is ProbeResult.OK
        self.good_in_a_row = self.good_in_a_row + 1 if good else 0
        self.bad_in_a_row = 0 if good else self.bad_in_a_row + 1
        if self.health.state == "down" and before == "up":
            assert self.bad_in_a_row >= CONFIG.fall
        if before == "down" and self.health.state == "up" and self.bad_in_a_row:
            raise AssertionError("a bad probe brought it up")

    @rule()
    def succeed(self) -> None:
        self.health.succeeded(self.now)
        self.failures_in_a_row = 0
        self.tenants_that_fail.clear()

    @rule(fatal=st.booleans(), refused=st.booleans())
    def fail(self, fatal: bool, refused: bool) -> None:
        self.health.failed(self.now, fatal=fatal, refused=refused)
        self.failures_in_a_row += 1
        if fatal and self.health.state != "down":
            assert self.health.state == "ejected"

    @rule(tenant=st.sampled_from(["a", "b"]), others=st.sampled_from([NO_PEERS, BUSY_PEERS]))
    def err(self, tenant: str, others: list[Blame]) -> None:
        before, until = self.health.state, self.health.ejected_until
        self.health.erred(self.now, tenant, others)
        self.tenants_that_fail.add(tenant)
        if before == "up" and self.health.state == "ejected" and until < self.now:
            assert len(self.tenants_that_fail) == 2 or others is BUSY_PEERS

    @rule()
    def restart(self) -> None:
        self.health.restarted()
        assert self.health.state != "ejected"

    @invariant()
    def an_ejection_is_never_longer_than_the_most(self) -> None:
        assert self.health.ejected_until - self.now <= CONFIG.eject_max_seconds * (1 + JITTER)

    @invariant()
    def enough_failures_in_a_row_leave_it_out(self) -> None:
        if self.failures_in_a_row >= CONFIG.eject_failures and self.health.state == "up":
            assert self.health.ejected_until < self.now  # it has been out since, or was restarted

    @invariant()
    def enough_good_probes_and_quiet_time_bring_it_back(self) -> None:
        if self.good_in_a_row >= CONFIG.rise and self.health.ejected_until < self.now:
            assert self.health.state == "up"


TestAnyHistory = AnyHistory.TestCase
