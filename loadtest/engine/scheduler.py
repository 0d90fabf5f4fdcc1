"""Continuous batching as in vLLM V1: running sequences first, then the queue, within a budget of tokens a step.

Pure: the caller passes the time, takes the next step, waits for its duration (`StepTime`), commits it. A decode step
costs O(sequences that cross a block boundary), not O(sequences): every decoding sequence advances by one token a step,
so one counter (`decode_clock`) gives the length of all of them, and ends and block boundaries are looked up by it.
"""

import heapq
from collections import deque
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

from loadtest.engine.kv_cache import BlockPool, CacheObserver, SequenceState, State
from loadtest.engine.step_time import StepTime


class Batching(StrEnum):
    """When sequences join a batch: at any step, as in vLLM, or in groups that end together, as in older engines."""

    CONTINUOUS = "continuous"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that bound a batch."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    _: KW_ONLY
    block_size: int = 16
    num_blocks: int = 27_000
    prefix_caching: bool = True
    chunked_prefill: bool = True
    batching: Batching = Batching.CONTINUOUS

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must be at least max_num_seqs: each running sequence needs a token"
            )


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    _: KW_ONLY
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # that a preempted sequence had computed, and did not find cached again
    steps: int = 0
    peak_running: int = 0
    peak_used_blocks: int = 0

    def on_admitted(self, sequence: SequenceState, *, looked_up: bool) -> None:
        """A prompt is prefilled for the first time; `looked_up`: in the prefix cache."""
        self.prompt_tokens += sequence.prompt_tokens
        self.prompt_tokens_cached += sequence.cached_tokens
        if looked_up:
            self.prefix_queries_tokens += sequence.prompt_tokens
            self.prefix_hits_tokens += sequence.cached_tokens

    def on_scheduled(self, running: int, used_blocks: int) -> None:
        self.peak_running = max(self.peak_running, running)
        self.peak_used_blocks = max(self.peak_used_blocks, used_blocks)

    def on_committed(self, steps: int, decoding: int) -> None:
        self.steps += steps
        self.generation_tokens += decoding * steps

    def on_first_token(self) -> None:
        self.generation_tokens += 1

    def on_preempted(self) -> None:
        self.preemptions += 1

    def on_recomputed(self, tokens: int) -> None:
        self.recomputed_tokens += tokens

    def restart_peaks(self, running: int, used_blocks: int) -> None:
        self.peak_running, self.peak_used_blocks = running, used_blocks


@dataclass(slots=True)
class Step:
    """One step that was scheduled, or `repeat` equal decode-only steps in a row."""

    duration_seconds: float
    repeat: int
    prefills: list[tuple[SequenceState, int]]
    _: KW_ONLY
    decode_sequences: int


@dataclass(slots=True)
class Committed:
    """A step's result: first tokens (or, pooling, answers) and ended sequences. Decoding ones got `repeat` tokens."""

    repeat: int
    started: list[SequenceState] = field(default_factory=list)
    finished: list[SequenceState] = field(default_factory=list)


class Scheduler:
    """Owns the queue, the batch and the blocks of one engine."""

    def __init__(self, limits: Limits, step_time: StepTime, observer: CacheObserver | None = None) -> None:
        self.limits = limits
        self.step_time = step_time
        self.pool = BlockPool(limits.num_blocks, observer)
        self._observer = observer
        self.counters = Counters()
        self.waiting: deque[SequenceState] = deque()
        # Both in order of admission. At most one sequence is partly prefilled: it used up its step's budget.
        self.decoding: dict[int, SequenceState] = {}
        self.prefilling: dict[int, SequenceState] = {}
        self.decode_clock = 0
        self._context_tokens = 0
        self._ends: list[tuple[int, int, SequenceState]] = []
        # decode_clock modulo block_size -> sequences with a next token that begins a block at that clock.
        self._boundaries: list[dict[int, SequenceState]] = [{} for _ in range(limits.block_size)]
        self._aborted_in_queue = 0

    def __repr__(self) -> str:
        return (
            f"<Scheduler {self.num_running}/{self.limits.max_num_seqs} running, {self.num_waiting} waiting, "
            f"{self.pool.num_used}/{self.pool.num_blocks} blocks>"
        )

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) - self._aborted_in_queue

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of that length can ever run."""
        return -(-tokens // self.limits.block_size) <= self.pool.num_blocks

    def add(self, sequence: SequenceState) -> None:
        """Put a new sequence at the end of the queue."""
        if sequence.prompt_tokens < 1:
            raise ValueError("a prompt has at least one token")
        if not self.fits(sequence.prompt_tokens + max(sequence.output_tokens - 1, 0)):
            raise ValueError("the sequence is longer than the whole KV cache")
        self.waiting.append(sequence)

    def abort(self, sequence: SequenceState) -> bool:
        """End a sequence now, wherever it is; False if it has ended already."""
        if sequence.state in (State.FINISHED, State.ABORTED):
            return False
        if sequence.state is State.WAITING:
            # Dropped when the queue is next looked at: removing from the middle would cost O(queue).
            self._aborted_in_queue += 1
        else:
            self._leave_batch(sequence)
            self._give_blocks_back(sequence)
        sequence.end(State.ABORTED)
        if not self.num_waiting:
            self.waiting.clear()
            self._aborted_in_queue = 0
        return True

    def generated_tokens(self, sequence: SequenceState) -> int:
        """Tokens that the sequence has got so far."""
        if sequence.state is State.DECODING:
            return sequence.earlier_generated_tokens + self.decode_clock - sequence.decode_since
        return sequence.earlier_generated_tokens

    def schedule(self, now_seconds: float, horizon_seconds: float | None = None) -> Step | None:
        """Choose the next step, None if there is nothing to do.

        With a horizon (the time of the next arrival), a decode-only step may be repeated while nothing else can happen
        before it: a replay in virtual time needs no more than the sum.
        """
        preempted = self._grow_decoding()
        if self._observer is not None:
            self._register_outputs()
        budget = self._budget_tokens()
        prefills: list[tuple[SequenceState, int]] = []
        duration = self.step_time.base_seconds
        for sequence in list(self.prefilling.values()):
            budget, seconds = self._prefill_chunk(sequence, budget, prefills)
            duration += seconds
        while not preempted and budget > 0 and self.waiting and self.num_running < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.state is State.ABORTED:
                self.waiting.popleft()
                self._aborted_in_queue -= 1
                continue
            if not self._admit(sequence, budget, now_seconds):
                break
            self.waiting.popleft()
            budget, seconds = self._prefill_chunk(sequence, budget, prefills)
            duration += seconds
        decodes = len(self.decoding)
        if not prefills and not decodes:
            return None
        self.counters.on_scheduled(self.num_running, self.pool.num_used)
        repeat = 1
        if horizon_seconds is not None and not prefills and not preempted:
            repeat = self._stretch(now_seconds, horizon_seconds)
            duration = self.step_time.decode_stretch_seconds(repeat, decodes, self._context_tokens)
        else:
            duration += self.step_time.decode_seconds(decodes, self._context_tokens)
        return Step(duration, repeat, prefills, decode_sequences=decodes)

    def commit(self, step: Step, now_seconds: float) -> Committed:
        """The step is done: hand out its tokens, end the sequences that are complete."""
        done = Committed(step.repeat)
        decoding = len(self.decoding)
        self.counters.on_committed(step.repeat, decoding)
        self.decode_clock += step.repeat
        self._context_tokens += decoding * step.repeat
        while self._ends and self._ends[0][0] <= self.decode_clock:
            until, _, sequence = heapq.heappop(self._ends)
            # An entry of an aborted or preempted sequence is stale.
            if sequence.state is State.DECODING and sequence.decode_until == until:
                self._finish(sequence, now_seconds)
                done.finished.append(sequence)
        for sequence, tokens in step.prefills:
            if sequence.state is State.PREFILLING and sequence.prefill(tokens):
                self._end_prefill(sequence, now_seconds, done)
        return done

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; refused while sequences hold some."""
        return self.pool.reset_cache()

    # --- admission and prefill -------------------------------------------------------------------------------------

    def _budget_tokens(self) -> int:
        """Prompt tokens that this step may compute."""
        if self.limits.batching is Batching.STATIC:
            # A group forms when the last one has ended, and is prefilled as a whole. Nothing joins it later.
            return 0 if self.num_running else self.limits.num_blocks * self.limits.block_size
        return self.limits.max_num_batched_tokens - len(self.decoding)

    def _admit(self, sequence: SequenceState, budget: int, now_seconds: float) -> bool:
        """Move a waiting sequence into the batch if all blocks of its prompt fit."""
        block_size, pool = self.limits.block_size, self.pool
        target = sequence.prefill_target_tokens
        hit: list[int] = []
        if self.limits.prefix_caching:
            # The last token is always computed, because its logits are needed.
            most = (target - 1) // block_size
            # A preempted sequence looks for the blocks of its own output too.
            keys = sequence.keys(0, most) if sequence.earlier_generated_tokens else sequence.prompt_keys
            hit = pool.find(keys, most)
        if not self.limits.chunked_prefill and target - len(hit) * block_size > budget:
            return False  # a prompt is computed in one step, or waits
        needed = -(-target // block_size) - len(hit)
        if needed + pool.num_free_among(hit) > pool.num_free:
            return False
        pool.take_cached(hit)
        is_new = sequence.scheduled_seconds < 0
        again = sequence.admit(hit + pool.allocate(needed), len(hit), block_size, now_seconds)
        if self._observer is not None and hit and sequence.content is not None and sequence.content.reports_hits:
            self._observer.on_stored(sequence, 0, None, sequence.keys(0, len(hit)))
        self.prefilling[sequence.sequence_id] = sequence
        self.counters.on_recomputed(again)
        if is_new:
            self.counters.on_admitted(sequence, looked_up=self.limits.prefix_caching)
        return True

    def _prefill_chunk(
        self, sequence: SequenceState, budget: int, prefills: list[tuple[SequenceState, int]]
    ) -> tuple[int, float]:
        """Give a sequence as much of the budget as it can use; its full blocks can be hit from now on."""
        computed = sequence.computed_tokens
        tokens = min(budget, sequence.prefill_target_tokens - computed)
        if tokens <= 0:
            return budget, 0.0
        if self.limits.prefix_caching:
            self._register(sequence, (computed + tokens) // self.limits.block_size)
        prefills.append((sequence, tokens))
        return budget - tokens, self.step_time.prefill_seconds(tokens, computed)

    def _end_prefill(self, sequence: SequenceState, now_seconds: float, done: Committed) -> None:
        """The prompt is computed: the same step samples a token."""
        del self.prefilling[sequence.sequence_id]
        cacheable_blocks = len(sequence.prompt_keys) if self.limits.prefix_caching else 0
        sequence.sample_first(now_seconds, cacheable_blocks * self.limits.block_size)
        done.started.append(sequence)
        if sequence.output_tokens:
            self.counters.on_first_token()
        if sequence.output_tokens <= sequence.earlier_generated_tokens:
            self._end(sequence, now_seconds)
            done.finished.append(sequence)
            return
        sequence.decode(self.decode_clock)
        self.decoding[sequence.sequence_id] = sequence
        self._context_tokens += sequence.computed_tokens
        if len(self._ends) > 2 * len(self.decoding) + 1024:
            self._ends = [(s.decode_until, s.sequence_id, s) for s in self.decoding.values()]
            heapq.heapify(self._ends)
        else:
            heapq.heappush(self._ends, (sequence.decode_until, sequence.sequence_id, sequence))
        self._boundaries[self._boundary_slot(sequence)][sequence.sequence_id] = sequence

    # --- decode ----------------------------------------------------------------------------------------------------

    def _boundary_slot(self, sequence: SequenceState) -> int:
        """The clock, modulo the block size, at which the sequence's next token to compute begins a block."""
        return (sequence.decode_since - sequence.computed_tokens) % self.limits.block_size

    def _grow_decoding(self) -> bool:
        """Give a block to each sequence that begins one, preempting the latest admitted when there is none."""
        preempted = False
        for sequence in list(self._boundaries[self.decode_clock % self.limits.block_size].values()):
            while sequence.state is State.DECODING and not self.pool.num_free:
                self._preempt_last()
                preempted = True
            if sequence.state is State.DECODING:
                sequence.grow(self.pool.allocate(1))
        return preempted

    def _stretch(self, now_seconds: float, horizon_seconds: float) -> int:
        """How many decode steps can be taken as one: until an end, the horizon, or a lack of blocks.

        The blocks that the steps begin are taken here, in the order in which single steps would take them.
        """
        while self._ends[0][2].state is not State.DECODING or self._ends[0][2].decode_until != self._ends[0][0]:
            heapq.heappop(self._ends)
        sequences = len(self.decoding)
        steps = self._ends[0][0] - self.decode_clock
        longest = self.step_time.base_seconds + self.step_time.decode_seconds(
            sequences, self._context_tokens + steps * sequences
        )
        steps = max(1, int(min(steps, 1 + (horizon_seconds - now_seconds) / longest)))
        for ahead in range(1, steps):
            beginning = self._boundaries[(self.decode_clock + ahead) % self.limits.block_size]
            if len(beginning) > self.pool.num_free:
                return ahead
            for sequence in beginning.values():
                sequence.grow(self.pool.allocate(1))
        return steps

    def _preempt_last(self) -> None:
        """Put the latest admitted sequence back at the head of the queue; it will recompute everything."""
        batch = self.prefilling or self.decoding
        sequence = batch[next(reversed(batch))]
        self._leave_batch(sequence)
        self._give_blocks_back(sequence)
        sequence.preempt()
        self.counters.on_preempted()
        self.waiting.appendleft(sequence)

    def _leave_batch(self, sequence: SequenceState) -> None:
        """Take a running sequence out of the batch and its indexes; its blocks stay with it."""
        if sequence.state is State.PREFILLING:
            del self.prefilling[sequence.sequence_id]
            return
        del self.decoding[sequence.sequence_id]
        del self._boundaries[self._boundary_slot(sequence)][sequence.sequence_id]
        sequence.stop_decoding(self.decode_clock)
        self._context_tokens -= sequence.computed_tokens

    def _finish(self, sequence: SequenceState, now_seconds: float) -> None:
        self._leave_batch(sequence)
        self._end(sequence, now_seconds)

    def _end(self, sequence: SequenceState, now_seconds: float) -> None:
        self._give_blocks_back(sequence)
        sequence.end(State.FINISHED, now_seconds)

    # --- blocks ----------------------------------------------------------------------------------------------------

    def _register(self, sequence: SequenceState, upto_block: int) -> None:
        """Make the sequence's full blocks before number `upto_block` findable."""
        first = sequence.registered_blocks
        if first >= upto_block:
            return
        keys = sequence.keys(first, upto_block)
        if not keys:
            return
        sequence.register(first + len(keys))
        self.pool.register(sequence.blocks[first : first + len(keys)], keys)
        if self._observer is not None:
            [parent] = sequence.keys(first - 1, first) if first else [None]
            self._observer.on_stored(sequence, first, parent, keys)

    def _register_outputs(self) -> None:
        """Register the output blocks that this step completes; unobserved, their sequence's end is early enough."""
        if not self.limits.prefix_caching:
            return
        block_size, clock = self.limits.block_size, self.decode_clock + 1
        for sequence in self._boundaries[clock % block_size].values():
            self._register(sequence, (sequence.computed_tokens + clock - sequence.decode_since) // block_size)

    def _give_blocks_back(self, sequence: SequenceState) -> None:
        """Release all blocks of a sequence that left the batch; its output's full blocks stay cached."""
        if self.limits.prefix_caching and sequence.output_tokens:
            self._register(sequence, sequence.computed_tokens // self.limits.block_size)
        self.pool.release(sequence.give_up_blocks())
