"""What a running engine says of itself: here, what fits is known."""

import asyncio
from dataclasses import dataclass

from gateway.backends.health import ProbeResult
from gateway.cli.check import examine, why_not_used
from gateway.config import ConfigError, parse
from gateway.plan.checkpoint import PlanError
from gateway.plan.memory import BLOCK_TOKENS, BlockPool, Group, KvLayout


@dataclass(frozen=True, slots=True)
class Running:
    """One backend; several engines (data-parallel ranks) have a KV cache each."""

    url: str
    model: str
    version: str | None
    max_length_tokens: int
    engines: int
    kv_tokens: int  # of one engine
    max_num_seqs: int | None  # of one engine; None = it does not tell
    pool: BlockPool


def ask_running(url: str, api_key: str = "") -> Running:
    """Ask a backend once. Raises PlanError."""
    try:
        config = parse({"backends": [{"url": url, "api_key": api_key}]})
    except ConfigError as error:
        raise PlanError(str(error).splitlines()[0]) from None
    [answers] = asyncio.run(examine(config))
    facts = answers.facts
    if answers.probe is not ProbeResult.OK:
        raise PlanError(f"{url}: {why_not_used(answers)}")
    if not facts.models:
        why = next(
            (str(error) for path, error in answers.problems.items() if path == "/v1/models"), "it lists no model"
        )
        raise PlanError(f"{url}: {why}" + (": give --api-key" if "401" in why else ""))
    if facts.kv_cache_tokens is None:
        raise PlanError(f"{url}/metrics does not tell the size of its KV cache: is this a vLLM server, with a decoder?")
    card = next((card for card in facts.models if card.parent is None), facts.models[0])
    if card.max_model_len is None:
        raise PlanError(f"{url}/v1/models does not tell max_model_len of {card.id}")
    block, tokens = facts.block_size_tokens or BLOCK_TOKENS, facts.kv_cache_tokens // facts.engines
    pool = BlockPool(KvLayout(block, 0, (Group(None),)), tokens // block)
    return Running(url, card.id, facts.version, card.max_model_len, facts.engines, tokens, facts.max_num_seqs, pool)
