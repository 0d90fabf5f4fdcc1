"""Processes that take over from one another share engines: their sum never exceeds a cap, and no request is stuck."""

from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.config import HealthConfig
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.settings import BackendConfig
from gateway.core.request import Demand
from gateway.core.routing.engine import EngineUse
from gateway.core.routing.estimates import Calibrations, CostModel, OutputLengths
from gateway.core.routing.policy import LeastLoadedPolicy
from gateway.core.scheduling.scheduler import Lease, Scheduler, SchedulerSettings
from gateway.core.scheduling.wait_queue import Queue, Ticket
from gateway.features.handover.slots import SlotSharing, engines_by_key

CAPS = {"http://a:1": 3, "http://b:1": 5}
KV_TOKENS = 8000
NOW = 100.0


class Process:
    """One process: its own view of the same engines, its requests, and its links to the processes beside it."""

    def __init__(self) -> None:
        configs = [BackendConfig(url=url, max_in_flight=cap, kv_cache_tokens=KV_TOKENS) for url, cap in CAPS.items()]
        self.fleet = Fleet(configs, HealthConfig(slow_start_seconds=0), clock=lambda: NOW, random=Random(1))
        for backend in self.fleet.backends:
            self.fleet.learned(backend, Facts(models=(ModelCard("m"),)))
            self.fleet.probed(backend, ProbeResult.OK)
        self.queue = Queue(100, 100_000)
        self.scheduler = Scheduler(
            self.fleet.candidates,
            LeastLoadedPolicy(),
            queue=self.queue,
            lengths=OutputLengths(),
            calibrations=Calibrations(CostModel()),
            settings=SchedulerSettings(),
        )
        self.sharing = SlotSharing(self.fleet, self.queue, OutputLengths(), kv_headroom=lambda: 1.0)
        self.leases: list[Lease] = []
        self.to_next: deque[tuple[int, Mapping[str, EngineUse]]] = deque()  # needs
        self.to_former: deque[tuple[int, Mapping[str, EngineUse]]] = deque()  # what is lent
        self.answers = 0  # the number of the needs that were answered last
        self.reported: Any = None

    def place(self, demand: Demand) -> None:
        placed = self.scheduler.place(demand, NOW)
        if isinstance(placed, Lease):
            self.leases.append(placed)

    def scan(self) -> None:
        for _, granted in self.scheduler.scan_queue("m", NOW):
            assert isinstance(granted, Lease)
            self.leases.append(granted)

    @property
    def in_flight(self) -> dict[str, int]:
        return {key: engine.load.in_flight for key, _, engine in engines_by_key(self.fleet.backends)}

    @property
    def is_busy(self) -> bool:
        return bool(self.leases or len(self.queue))


class HandoverMachine(RuleBasedStateMachine):
    """Messages arrive late and in order. Requests come to the last process; former ones may send theirs again."""

    def __init__(self) -> None:
        super().__init__()
        self.line = [Process()]

    def _report(self, at: int) -> None:
        """As the processes do after each step: report needs to the next one, and what is lent to the former one."""
        process = self.line[at]
        if at + 1 < len(self.line) and process.reported != process.sharing.number:
            process.reported = process.sharing.number
            process.to_next.append((process.sharing.number, process.sharing.needs))
        if at:
            process.to_former.append((process.answers, process.sharing.lent))

    @rule(sequences=st.integers(1, 3), tokens=st.sampled_from([10, 900, 3000]))
    def arrive(self, sequences: int, tokens: int) -> None:
        self.line[-1].place(Demand("m", sequences=sequences, prompt_tokens=tokens, output_tokens=50))

    @rule(which=st.integers(0, 3), sequences=st.integers(1, 3))
    def send_again(self, which: int, sequences: int) -> None:
        process = self.line[which % len(self.line)]
        if process.is_busy:
            process.place(Demand("m", sequences=sequences, prompt_tokens=10, output_tokens=50))

    @rule(which=st.integers(0, 3), lease=st.integers(0, 20))
    def end(self, which: int, lease: int) -> None:
        process = self.line[which % len(self.line)]
        if process.leases:
            process.scheduler.release(process.leases.pop(lease % len(process.leases)), NOW)
            process.scan()

    @precondition(lambda self: len(self.line) < 4)
    @rule()
    def hand_over(self) -> None:
        former, new = self.line[-1], Process()
        former.sharing.hand_over()
        new.sharing.take_place(former.sharing.needs)
        new.answers = former.reported = former.sharing.number
        self.line.append(new)

    @rule(which=st.integers(0, 3))
    def step(self, which: int) -> None:
        at = which % len(self.line)
        self.line[at].sharing.step()
        self.line[at].scan()
        self._report(at)

    @rule(which=st.integers(0, 3), forward=st.booleans())
    def deliver(self, which: int, forward: bool) -> None:
        at = which % len(self.line)
        process = self.line[at]
        if forward and process.to_next:
            number, needs = process.to_next.popleft()
            new = self.line[at + 1]
            new.sharing.need(needs)
            new.answers = number
            self._report(at + 1)
        elif not forward and process.to_former:
            former = self.line[at - 1]
            former.sharing.borrow(*process.to_former.popleft())
            former.scan()

    @precondition(lambda self: len(self.line) > 1 and not self.line[0].is_busy)
    @rule()
    def first_one_leaves(self) -> None:
        self.line.pop(0)
        self.line[0].to_former.clear()
        self.line[0].sharing.need({})

    @precondition(lambda self: len(self.line) > 1)
    @rule()
    def last_one_fails(self) -> None:
        self.line.pop()
        self.line[-1].to_next.clear()
        self.line[-1].sharing.go_on_alone()

    @invariant()
    def the_sum_never_exceeds_a_cap(self) -> None:
        for url, cap in CAPS.items():
            assert sum(process.in_flight[f"{url} "] for process in self.line) <= cap

    def teardown(self) -> None:
        """Whatever happened, all requests are served once messages arrive and requests end."""
        for _ in range(400):
            for at in range(len(self.line)):
                self.step(at)
                for forward in (True, False):
                    while self.line[at].to_next if forward else self.line[at].to_former:
                        self.deliver(at, forward)
                if self.line[at].leases:
                    self.end(at, 0)
        assert not any(process.is_busy for process in self.line), [len(process.queue) for process in self.line]
        assert self.line[-1].sharing.lent == {}


TestHandovers = HandoverMachine.TestCase
TestHandovers.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def place_all(process: Process, count: int) -> None:
    for _ in range(count):
        process.place(Demand("m", sequences=1, prompt_tokens=10, output_tokens=10))


def test_a_full_process_leaves_the_next_one_nothing_until_its_requests_end() -> None:
    former, new = Process(), Process()
    place_all(former, 9)
    assert len(former.queue) == 1
    former.sharing.hand_over()
    new.sharing.need(former.sharing.needs)
    place_all(new, 1)
    assert len(new.queue) == 1
    former.scheduler.release(former.leases.pop(), NOW)
    former.scan()  # what waited there longer comes first
    assert len(former.queue) == 0
    former.scheduler.release(former.leases.pop(), NOW)
    former.sharing.step()
    new.sharing.need(former.sharing.needs)
    new.scan()
    assert len(new.queue) == 0


def test_a_slot_that_is_given_up_is_not_used_again_until_it_is_lent() -> None:
    former = Process()
    place_all(former, 8)
    former.sharing.hand_over()
    while former.leases:
        former.scheduler.release(former.leases.pop(), NOW)
    former.sharing.step()
    assert former.sharing.needs == {}
    place_all(former, 1)
    assert len(former.queue) == 1
    former.sharing.step()
    former.sharing.borrow(1, {"http://a:1 ": EngineUse(3, 8000)})  # an answer to former needs
    former.scan()
    assert len(former.queue) == 1
    former.sharing.borrow(former.sharing.number, {"http://a:1 ": EngineUse(1, 8000)})
    former.scan()
    assert len(former.queue) == 0


def test_an_engine_that_only_the_former_process_has_is_its_own() -> None:
    former, new = Process(), Process()
    place_all(former, 1)
    former.sharing.hand_over()
    needs = {**former.sharing.needs, "http://gone:1 ": EngineUse(2, 100)}
    new.sharing.need(needs)
    assert new.sharing.lent["http://gone:1 "] == EngineUse(2, 100)


def test_a_ticket_is_counted_once_on_each_engine_that_it_may_go_to() -> None:
    process = Process()
    place_all(process, 10)
    process.sharing.hand_over()
    assert {key: use.slots for key, use in process.sharing.needs.items()} == {"http://a:1 ": 3, "http://b:1 ": 5}
    assert all(isinstance(ticket, Ticket) for ticket in process.queue)
