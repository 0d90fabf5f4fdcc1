"""A KV cache that holds a third of what the engine may run at once: behind the gateway hardly one is preempted."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest
from openai import AsyncOpenAI

from loadtest.vllm_cpu.process import VllmOptions, VllmProcess
from tests.integration.conftest import engine_kind
from tests.integration.fleet import CHAT_MODEL, MODELS, print_progress, simulated_engine
from tests.integration.gateway_process import SDK_TIMEOUT_SECONDS, Gateway, running_gateway
from tests.integration.observed import engines_become_idle, gateway_holds_nothing, read
from tests.integration.prompts import chat

pytestmark = pytest.mark.alone  # preemptions depend on how soon the gateway hears of tokens

BLOCK_TOKENS = 32
BLOCKS = 96
MOST_AT_ONCE = 32
LONGEST_TOKENS = 1024
# With their prompts, some eight of them fill the cache; no two that come one after the other are alike.
TOKENS = [96 + 48 * (5 * number % 11) for number in range(28)]
WARM_UP = [16] * 4
SIMULATED = (
    "--model", CHAT_MODEL, "--preset", "cpu-tiny", "--block-size", str(BLOCK_TOKENS),
    "--kv-tokens", str(BLOCKS * BLOCK_TOKENS), "--max-num-seqs", str(MOST_AT_ONCE),
    "--max-model-len", str(LONGEST_TOKENS),
)  # fmt: skip


@pytest.fixture(scope="module")
def engine_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine that may run more than its KV cache holds."""
    logs = tmp_path_factory.mktemp("small")
    with ExitStack() as stack:
        if engine_kind(request.config) == "sim":
            yield stack.enter_context(simulated_engine(logs, *SIMULATED)).url
            return
        options = VllmOptions(
            MODELS / CHAT_MODEL, block_size_tokens=BLOCK_TOKENS, max_num_seqs=MOST_AT_ONCE,
            max_model_len_tokens=LONGEST_TOKENS, flags=("--num-gpu-blocks-override", str(BLOCKS)),
        )  # fmt: skip
        yield stack.enter_context(VllmProcess(options, logs / "vllm-small.log", print_progress)).url


@pytest.fixture
def gateway(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that leaves a sixth of the cache free: of so few blocks each sequence may be two off, one for its part
    of a block, and one that the engine takes before the gateway hears of its tokens.
    """
    config = {"backends": [{"url": engine_url}], "admission": {"kv_headroom": 5 / 6}}
    with running_gateway(tmp_path_factory.mktemp("gateway"), config) as running:
        yield running


@pytest.fixture
async def direct(engine_url: str) -> AsyncIterator[AsyncOpenAI]:
    """The SDK pointed at the engine itself."""
    async with AsyncOpenAI(
        base_url=f"{engine_url}/v1", api_key="none", max_retries=0, timeout=SDK_TIMEOUT_SECONDS
    ) as sdk:
        yield sdk


async def preemptions(engine_url: str) -> float:
    """As the engine counts them since its start."""
    return await read(engine_url, "vllm:num_preemptions_total")


async def flood(sdk: AsyncOpenAI, wanted: list[int]) -> float:
    """Answers of these lengths at once, every one whole; returns the tokens per second."""
    started = time.perf_counter()
    lengths = await asyncio.gather(*(streamed(sdk, tokens) for tokens in wanted))
    seconds = time.perf_counter() - started
    assert lengths == wanted
    return sum(lengths) / seconds


async def streamed(sdk: AsyncOpenAI, tokens: int) -> int:
    """Read one answer to its end; its length, as the engine counts it."""
    stream = await sdk.chat.completions.create(
        **chat(tokens=tokens), stream=True, stream_options={"include_usage": True}
    )
    usages = [chunk.usage async for chunk in stream if chunk.usage is not None]
    return int(usages[-1].completion_tokens)


async def test_a_flood_preempts_at_the_engine_and_hardly_behind_the_gateway(
    engine_url: str, direct: AsyncOpenAI, gateway: Gateway
) -> None:
    alone = await flood(direct, TOKENS)
    sent_directly = await preemptions(engine_url)
    assert sent_directly > 0, "the cache must be too small for the flood"
    await engines_become_idle((engine_url,))
    async with gateway.client() as sdk:
        await flood(sdk, WARM_UP)
        admitted = await flood(sdk, TOKENS)
    await gateway_holds_nothing(gateway.admin_url)
    through_gateway = await preemptions(engine_url) - sent_directly
    print_progress(
        f"preemptions: {sent_directly:.0f} directly, {through_gateway:.0f} through the gateway; "
        f"tokens/s: {alone:.0f} directly, {admitted:.0f} through the gateway ({admitted / alone:.2f})"
    )
    assert through_gateway <= sent_directly / 10  # a loaded machine delays the tokens that the gateway counts
