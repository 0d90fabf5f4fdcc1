"""What the handlers of one simulated engine share."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import xxhash
from aiohttp import web

from loadtest.engine.api.errors import engine_dead, queue_full, too_long, unknown_model
from loadtest.engine.choice import Choice, PreparedPrompt, content_of, find_nonce, find_replayed, plan_choice
from loadtest.engine.config import EngineConfig
from loadtest.engine.faults import Faults, ServerFaults
from loadtest.engine.kv_event_publisher import KvEventPublishers
from loadtest.engine.ledger import Ending, Ledger, LedgerEntry
from loadtest.engine.ranks import EngineRanks
from loadtest.engine.request_parameters import SamplingParams, Steering
from loadtest.engine.tokens import BYTES_PER_TOKEN, TokenisedText, block_keys, detokenise, namespace


@dataclass(slots=True)
class Service:
    """One engine's configuration, model, and records. Handlers get it and the request, nothing else."""

    config: EngineConfig
    _: KW_ONLY
    engine: EngineRanks
    kv_events: KvEventPublishers | None
    unix_seconds: Callable[[], float]
    random: random.Random
    ledger: Ledger
    faults: Faults
    started_unix_seconds: float
    # Become a new process; the connection of the given request is kept.
    restart: Callable[[web.BaseRequest | None], Awaitable[None]]
    responses: dict[str, Any] = field(default_factory=dict)
    background: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # responses that are generated unattended
    http_requests: dict[tuple[str, str, str], int] = field(default_factory=dict)
    server_load: int = 0
    is_asleep: bool = False
    loaded_adapters: list[str] = field(default_factory=list)  # since the start

    @property
    def adapters(self) -> tuple[str, ...]:
        return (*self.config.lora_adapters, *self.loaded_adapters)

    @property
    def fingerprint(self) -> str:
        ranks = f"-dp{self.config.data_parallel_size}" if self.config.data_parallel_size > 1 else ""
        return f"vllm-{self.config.version}{ranks}-{namespace(self.config.model) & 0xFFFFFFFF:08x}"

    @property
    def served_model(self) -> str:
        """The name of the base model, as it is at present."""
        return self.faults.model or self.config.model

    def begin(self, entry: LedgerEntry) -> None:
        self.server_load += entry.inference

    def end(self, entry: LedgerEntry, ending: Ending) -> None:
        self.server_load -= entry.inference
        self.ledger.end(entry, ending)

    def count(self, handler: str, method: str, status: int) -> None:
        """One more answer, for the metrics."""
        key = (handler, method, f"{status // 100}xx")
        self.http_requests[key] = self.http_requests.get(key, 0) + 1

    def become_new(self, engine: EngineRanks, kv_events: KvEventPublishers | None) -> None:
        """As after a restart: nothing is left but the name of the model."""
        self.engine, self.kv_events = engine, kv_events
        self.faults.replace(ServerFaults(model=self.faults.model))
        self.started_unix_seconds = self.unix_seconds()
        self.is_asleep = False
        self.loaded_adapters.clear()
        self.responses.clear()
        self.stop_background()
        self.http_requests.clear()

    def stop_background(self) -> None:
        """Generate no response any further that has been answered already."""
        for task in self.background.values():
            task.cancel()

    def new_id(self) -> str:
        return f"{self.random.getrandbits(64):016x}"

    def request_id(self, request: web.BaseRequest) -> str:
        """The client's request id, else a new one."""
        return request.headers.get("X-Request-Id") or self.new_id()

    def created(self) -> int:
        """Now, as the `created` field has it."""
        return int(self.unix_seconds())

    def check_model(self, model: Any, with_aliases: bool = True) -> str:
        """The name under which the request is answered; 404 if it is not served."""
        served = self.served_model
        if not model:
            return served
        if model == served or model in self.adapters:
            return str(model)
        raise unknown_model(str(model), served, with_aliases)

    def check_admission(self, num_sequences: int) -> None:
        """503 if too much is queued, 500 if the engine is dead or asleep."""
        if self.faults.engine_dead or self.is_asleep:
            raise engine_dead()
        limit = self.config.max_num_queued_reqs
        if limit is not None and self.engine.num_requests + num_sequences > limit:
            self.engine.reject()
            raise queue_full()

    def prompt(
        self, tokens: TokenisedText, text: str, model: str, cache_salt: str, *, has_ids: bool = False
    ) -> PreparedPrompt:
        """Hash a prompt; 400 if it exceeds the context. One of token ids may end with the beginning of its answer."""
        if tokens.num_tokens > self.config.max_model_len:
            raise too_long(tokens.num_tokens, self.config.max_model_len)
        lora = None if model == self.served_model else model
        parent = namespace(lora or "", cache_salt)
        keys = block_keys(tokens.packed, self.config.limits.block_size, parent)
        nonce = find_nonce(text) if "nonce:" in text else None
        # What a model says depends on the prompt, not on the salt of its cache.
        seed_of = partial(xxhash.xxh3_64_intdigest, seed=namespace(lora or ""))
        replayed = find_replayed(tokens.packed, seed_of) if has_ids else 0
        own = tokens.packed[: len(tokens.packed) - replayed * BYTES_PER_TOKEN]
        if replayed and nonce is not None:
            nonce = find_nonce(detokenise(own))
        return PreparedPrompt(
            tokens,
            keys=keys,
            parent_key=parent,
            seed=seed_of(own),
            nonce=nonce,
            lora_name=lora,
            cache_salt=cache_salt or None,
            replayed_tokens=replayed,
        )

    def choices(
        self,
        prompts: Iterable[PreparedPrompt],
        sampling: SamplingParams,
        entry: LedgerEntry,
        steering: Steering | None = None,
    ) -> list[Choice]:
        """One planned answer for each prompt and each of its `n`."""
        planned: list[Choice] = []
        forced = entry.script.output_tokens if entry.script else None
        steering = steering or Steering()
        for prompt in prompts:
            room = self.config.max_model_len - prompt.tokens.num_tokens
            limit = max(1, room if sampling.max_tokens is None else min(room, sampling.max_tokens))
            for number in range(sampling.n):
                choice = plan_choice(
                    len(planned),
                    self.engine.new_id(),
                    prompt=prompt,
                    sampling=sampling,
                    limit_tokens=limit,
                    block_size=self.config.limits.block_size,
                    forced_tokens=forced,
                )
                if self.kv_events is not None:
                    content = content_of(choice, prompt, self._lora_id(prompt.lora_name), steering)
                    choice.sequence.publish(content)
                planned.append(replace(choice, rank=steering.rank, first_of=None if number else sampling.n))
        return planned

    def _lora_id(self, name: str | None) -> int | None:
        """vLLM numbers adapters from 1 on, as they are named at its start."""
        return None if name is None else 1 + self.adapters.index(name)
