"""Which gateway runs which lines, in virtual time: gateways are slow, freeze or are killed; batches are cancelled."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.features.batches.claims import CLAIM_SECONDS, Claim, Progress, next_claim

NAMES = ["a", "b", "c"]


def progress(*claims: Claim, total: int = 1000, is_over: bool = False) -> Progress:
    return Progress(total, claims, is_over)


def test_a_gateway_takes_half_of_its_share_of_what_is_left() -> None:
    first = next_claim(progress(), "a", 2, 100.0)
    assert first == Claim(0, 250, "a", 100.0 + CLAIM_SECONDS)
    assert next_claim(progress(first), "b", 2, 100.0) == Claim(250, 437, "b", 100.0 + CLAIM_SECONDS)
    assert next_claim(progress(total=50), "a", 2, 0.0) == Claim(0, 50, "a", CLAIM_SECONDS)
    assert next_claim(progress(total=50000), "a", 1, 0.0) == Claim(0, 4096, "a", CLAIM_SECONDS)


def test_a_lost_claim_is_taken_over_before_new_lines() -> None:
    lost, done = Claim(0, 250, "a", 100.0), Claim(250, 437, "b", 0.0, is_done=True)
    assert next_claim(progress(lost, done), "b", 1, 99.9) == Claim(437, 718, "b", 99.9 + CLAIM_SECONDS)
    assert next_claim(progress(lost, done), "b", 1, 100.0) == Claim(0, 250, "b", 100.0 + CLAIM_SECONDS)


def test_the_end_is_claimed_once_when_all_lines_are_done() -> None:
    lines = Claim(0, 1000, "a", 0.0, is_done=True)
    assert next_claim(progress(lines._replace(is_done=False, until=9.0)), "b", 2, 5.0) is None
    end = next_claim(progress(lines), "b", 2, 5.0)
    assert end == Claim(1000, 1000, "b", 5.0 + CLAIM_SECONDS)
    assert progress(lines, end).is_complete
    assert next_claim(progress(lines, end), "a", 2, 6.0) is None
    assert next_claim(progress(lines, end), "a", 2, 5.0 + CLAIM_SECONDS) == end._replace(
        holder="a", until=5.0 + 2 * CLAIM_SECONDS
    )


def test_when_a_batch_is_over_no_lines_are_claimed_and_those_in_flight_end_first() -> None:
    held = Claim(0, 250, "a", 10.0)
    assert next_claim(progress(held, is_over=True), "b", 2, 9.0) is None
    end = next_claim(progress(held, is_over=True), "b", 2, 10.0)
    assert end is not None
    assert end.is_last
    assert not progress(held, end).is_complete


class Gateways(RuleBasedStateMachine):
    """Three gateways and one batch. A line has an answer as often as gateways ran it."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 700
        self.now = 0.0
        self.kept: dict[int, Claim] = {}  # as the database has them
        self.own: dict[str, dict[int, int]] = {name: {} for name in NAMES}  # first and next line, by gateway
        self.answers: set[int] = set()
        self.is_over = self.is_ended = False
        self.ends = 0

    @property
    def claims(self) -> list[Claim]:
        return sorted(self.kept.values())

    @rule(name=st.sampled_from(NAMES))
    def claims_lines(self, name: str) -> None:
        found = Progress(self.total, self.claims, self.is_over)
        if self.is_ended or (claim := next_claim(found, name, 3, self.now)) is None:
            return
        before = self.kept.get(claim.first)
        assert before is None or (not before.is_done and before.until <= self.now and before.end == claim.end)
        assert claim.holder == name
        assert claim.until == self.now + CLAIM_SECONDS
        assert not (claim.is_last and not found.is_complete and not self.is_over)
        assert not (self.is_over and not claim.is_last)
        self.kept[claim.first] = claim
        self.own[name][claim.first] = claim.first

    @rule(name=st.sampled_from(NAMES), lines=st.integers(1, 300))
    def runs_lines(self, name: str, lines: int) -> None:
        """It may have lost the claim: a gateway that was frozen does not know."""
        for first, at in [*self.own[name].items()]:
            claim = self.kept[first]
            until = min(claim.end, at + lines)
            self.answers.update(range(at, until))
            self.own[name][first] = until
            if until == claim.end:
                self.finishes(name, claim)

    def finishes(self, name: str, claim: Claim) -> None:
        del self.own[name][claim.first]
        if claim.holder != name:
            return
        if claim.is_last:
            assert not self.is_ended
            self.is_ended = True
            self.ends += 1
            assert self.is_over or len(self.answers) == self.total
        else:
            self.kept[claim.first] = claim._replace(is_done=True, until=0.0)

    @rule(names=st.sets(st.sampled_from(NAMES)), seconds=st.floats(0.5, 20.0))
    def time_passes(self, names: set[str], seconds: float) -> None:
        """These gateways extend their claims at its end; the others are frozen."""
        self.now += seconds
        for first, claim in self.kept.items():
            if claim.holder in names and first in self.own[claim.holder] and not claim.is_done:
                self.kept[first] = claim._replace(until=self.now + CLAIM_SECONDS)

    @rule(name=st.sampled_from(NAMES))
    def is_killed(self, name: str) -> None:
        self.own[name].clear()

    @precondition(lambda self: len(self.answers) > 300)
    @rule()
    def is_cancelled(self) -> None:
        self.is_over = True

    @invariant()
    def claims_are_ranges_one_after_the_other(self) -> None:
        lines = [claim for claim in self.claims if not claim.is_last]
        assert [claim.first for claim in lines] == [0, *(claim.end for claim in lines[:-1])][: len(lines)]
        assert all(claim.end <= self.total for claim in lines)

    @invariant()
    def what_is_done_has_answers(self) -> None:
        for claim in self.claims:
            assert not claim.is_done or self.answers.issuperset(range(claim.first, claim.end))

    def teardown(self) -> None:
        """One gateway that is left alone ends the batch."""
        self.is_killed("b")
        self.is_killed("c")
        for _ in range(200):
            if self.is_ended:
                break
            self.time_passes({"a"}, CLAIM_SECONDS)
            self.claims_lines("a")
            self.runs_lines("a", 4096)
        assert self.ends == 1


TestGateways = Gateways.TestCase
TestGateways.settings = settings(stateful_step_count=40)
