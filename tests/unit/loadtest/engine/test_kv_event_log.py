"""The log of KV events mirrors the block pool exactly, and reports what hashes to the blocks' own keys."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loadtest.engine.choice import Choice, PreparedPrompt, content_of, plan_choice
from loadtest.engine.kv_event_publisher import KvEventLog, long_hash
from loadtest.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, HashFormat
from loadtest.engine.request_parameters import SamplingParams, Steering
from loadtest.engine.scheduler import Limits, Scheduler, Step
from loadtest.engine.step_time import PRESETS
from loadtest.engine.tokens import block_keys, from_ids, namespace, tokenise

BLOCK = 4
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=12, block_size=BLOCK, num_blocks=12)


def planned(
    number: int, text: str, output: int, lora: str | None = None, salt: str = "", steering: Steering | None = None
) -> Choice:
    """An answer of that many tokens to a prompt."""
    tokens, root = tokenise(text), namespace(lora or "", salt)
    prompt = PreparedPrompt(
        tokens,
        keys=block_keys(tokens.packed, BLOCK, root),
        parent_key=root,
        seed=len(text),
        nonce=None,
        lora_name=lora,
        cache_salt=salt or None,
    )
    choice = plan_choice(0, number, prompt, SamplingParams(ignore_eos=True), output, BLOCK)
    choice.sequence.content = content_of(choice, prompt, 1 if lora else None, steering or Steering())
    return choice


def hashes_to_its_keys(event: BlockStored) -> bool:
    """Whether parent, adapter, salt and tokens make the hashes in the event."""
    assert event.extra_keys is not None
    assert len(event.extra_keys) == len(event.block_hashes)
    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
    first, lora = event.extra_keys[0] or (), event.lora_name
    assert all(keys == ((lora,) if lora else None) for keys in event.extra_keys[1:])
    salt = first[-1] if len(first) > (lora is not None) else ""
    parent = event.parent_block_hash
    if parent is None:
        parent = namespace(lora or "", salt)
    else:
        assert first == ((lora,) if lora else ()), "a cache salt is reported of the first block alone"
    assert isinstance(parent, int)
    return block_keys(from_ids(event.token_ids).packed, event.block_size, parent) == event.block_hashes


class LogMachine(RuleBasedStateMachine):
    """One engine with little memory whose log is followed, now and then, by a mirror."""

    def __init__(self) -> None:
        super().__init__()
        self.log = KvEventLog(BLOCK, HashFormat.INT)
        self.scheduler = Scheduler(LIMITS, PRESETS["h100-8b"], self.log)
        self.now_seconds = 0.0
        self.step: Step | None = None
        self.choices: list[Choice] = []
        self.mirror: Counter[Any] = Counter()

    @rule(
        letter=st.sampled_from("ab"),
        prompt=st.integers(1, 24),
        output=st.integers(1, 16),
        lora=st.sampled_from([None, "adapter"]),
        salt=st.sampled_from(["", "tenant"]),
    )
    def arrive(self, letter: str, prompt: int, output: int, lora: str | None, salt: str) -> None:
        choice = planned(len(self.choices), letter * 4 * prompt, output, lora, salt)
        self.choices.append(choice)
        self.scheduler.add(choice.sequence)

    @precondition(lambda self: self.step is None)
    @rule()
    def schedule(self) -> None:
        self.step = self.scheduler.schedule(self.now_seconds)

    @precondition(lambda self: self.step is not None)
    @rule()
    def commit(self) -> None:
        assert self.step is not None
        self.now_seconds += self.step.duration_seconds
        self.scheduler.commit(self.step, self.now_seconds)
        self.step = None

    @precondition(lambda self: self.choices)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(self.choices[data.draw(st.integers(0, len(self.choices) - 1))].sequence)

    @rule()
    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()

    @invariant()
    def the_mirror_is_the_pool(self) -> None:
        for event in self.log.take():
            self.follow(event)
        assert self.mirror == self.scheduler.pool.cached_keys()

    def follow(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            assert hashes_to_its_keys(event)
            self.mirror.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            [key] = event.block_hashes
            assert self.mirror[key] > 0
            self.mirror[key] -= 1
            self.mirror += Counter()
        else:
            assert isinstance(event, AllBlocksCleared)
            self.mirror.clear()


LogMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestLogMachine = LogMachine.TestCase


def run_alone(scheduler: Scheduler, log: KvEventLog, choice: Choice) -> list[list[Event]]:
    """The events of each step that has any, until the sequence ends."""
    scheduler.add(choice.sequence)
    reported = []
    while step := scheduler.schedule(0.0):
        scheduler.commit(step, 0.0)
        if events := log.take():
            reported.append(events)
    return reported


def engine() -> tuple[Scheduler, KvEventLog]:
    log = KvEventLog(BLOCK, HashFormat.INT)
    return Scheduler(LIMITS, PRESETS["h100-8b"], log), log


def stored(reported: list[list[Event]]) -> list[list[tuple[int, bool]]]:
    """For each step and event, how many blocks were stored, and whether others come before them."""
    blocks = [[event for event in events if isinstance(event, BlockStored)] for events in reported]
    assert [len(events) for events in blocks] == [len(events) for events in reported]
    return [[(len(e.block_hashes), e.parent_block_hash is not None) for e in events] for events in blocks]


def test_a_chunk_of_prefill_is_one_event_and_each_output_block_another_when_it_is_full() -> None:
    scheduler, log = engine()
    choice = planned(1, "a" * 4 * 18, 10)
    reported = run_alone(scheduler, log, choice)
    # 12 tokens, 6 more of which 4 fill a block; of the output, tokens 2 and 6 fill one each.
    assert stored(reported) == [[(3, False)], [(1, True)], [(1, True)], [(1, True)]]
    flat = [event for events in reported for event in events]
    assert [event.token_ids for event in flat if isinstance(event, BlockStored)][2] == choice.prompt.ids()[16:] + (
        choice.token_ids(0, 2)
    )


def test_a_repeated_prompt_of_whole_blocks_stores_a_second_copy_of_its_last_one() -> None:
    scheduler, log = engine()
    run_alone(scheduler, log, planned(1, "a" * 4 * 8, 1))
    [[again]] = run_alone(scheduler, log, planned(2, "a" * 4 * 8, 1))
    assert isinstance(again, BlockStored)
    assert (len(again.block_hashes), again.parent_block_hash is None) == (1, False)
    assert max(scheduler.pool.cached_keys().values()) == 2


def test_blocks_found_in_the_cache_are_reported_on_request() -> None:
    scheduler, log = engine()
    [first, *_] = run_alone(scheduler, log, planned(1, "a" * 4 * 10, 1))
    assert run_alone(scheduler, log, planned(2, "a" * 4 * 10, 1)) == []
    asked = planned(3, "a" * 4 * 10, 1, steering=Steering(reports_hits=True))
    assert run_alone(scheduler, log, asked) == [first]


def test_a_session_is_named_in_what_it_stores() -> None:
    scheduler, log = engine()
    [[event]] = run_alone(scheduler, log, planned(1, "a" * 4 * 4, 1, steering=Steering(session_id="s")))
    assert isinstance(event, BlockStored)
    assert event.session_id == "s"


def test_whole_hashes_end_with_the_short_ones() -> None:
    log = KvEventLog(BLOCK, HashFormat.BYTES)
    log.on_removed(7)
    [event] = log.take()
    assert isinstance(event, BlockRemoved)
    assert event.block_hashes == [long_hash(7)]
    assert len(long_hash(7)) == 32
    assert int.from_bytes(long_hash(2**64 - 1), "big") & (2**64 - 1) == 2**64 - 1
