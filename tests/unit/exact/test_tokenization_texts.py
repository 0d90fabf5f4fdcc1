"""Several texts at once: their tokens are counted in bounded time, and only where every backend counts alike."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic

import pytest
from structlog.testing import capture_logs

from gateway.core.backends.facts import Facts, ModelCard
from gateway.features.exact.tokenization import NotCounted, QuestionLimits, Tokenization
from gateway.features.exact.tokenizer import TokenizerProcess
from tests.unit.backends.scripted import Answer, Scripted
from tests.unit.exact.backends import embeds, tokenizes
from tests.unit.exact.fake_worker import COMMAND, DIES, HANGS, SLOW_SECONDS
from tests.unit.exact.test_tokenization import DEADLINE_SECONDS, MODELS, PATIENT, fleet_of, until_judged

SLOW = "#slow"
BATCHES = PATIENT.batches._replace(wait_seconds=DEADLINE_SECONDS, max_waiting=3)
HASTY_BATCHES = BATCHES._replace(wait_seconds=0.05, pause_seconds=0.3)


@asynccontextmanager
async def counting(*answers: Answer, batches: QuestionLimits = BATCHES) -> AsyncIterator[Tokenization]:
    """The tokenization of a fleet whose backends tokenize, and embed as given."""
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_SECONDS):
        servers = [await stack.enter_async_context(Scripted()) for _ in answers]
        for server, answer in zip(servers, answers, strict=True):
            server.answers |= {"/tokenize": tokenizes(), "/v1/embeddings": answer}
        fleet = fleet_of(*servers)
        limits = PATIENT._replace(batches=batches)
        tokenization = Tokenization(MODELS, fleet, monotonic, limits=limits, process=TokenizerProcess(COMMAND))
        fleet.on_change.append(tokenization.look_again)
        fleet.on_restart.append(tokenization.forget)
        await stack.enter_async_context(tokenization)
        await until_judged(tokenization, len(answers))
        yield tokenization


async def count(tokenization: Tokenization, *texts: str, size_bytes: int = 50) -> list[int] | NotCounted:
    return await tokenization.count("m", list(texts), size_bytes, special=True)


async def test_texts_are_counted() -> None:
    async with counting(embeds(), embeds()) as tokenization:
        assert tokenization.configured("m")
        assert tokenization.counts_alike("m", "b0")
        assert await count(tokenization, "Hi", "") == [4, 2]
        assert await tokenization.count("m", ["Hi"], 2, special=False) == [2]
        assert not any(tokenization.totals.values()), "those are of prompts"


async def test_texts_are_counted_for_those_who_count_alike_and_others_say_why_they_do_not() -> None:
    with capture_logs() as logs:
        async with counting(embeds(), embeds(str.lower)) as tokenization:
            assert await count(tokenization, "Hi") == [4]
            assert tokenization.counts_alike("m", "b0")
            assert not tokenization.counts_alike("m", "b1")
            assert tokenization.accepted("m", "b1"), "its prompts are alike"
            shown = [tokenization.verdicts(name)["m"] for name in ("b0", "b1")]
    [differs] = [log for log in logs if log["event"] == "embedding_tokens_differ"]
    assert (differs["backend"], differs["log_level"]) == ("b1", "warning")
    assert [one["embeddings"] for one in shown] == [True, False]
    assert shown[1]["reason"] == differs["reason"] != ""


async def test_a_backend_that_has_restarted_is_to_be_seen_again_before() -> None:
    async with counting(embeds()) as tokenization:
        fleet = tokenization._fleet
        [backend] = fleet.backends
        fleet.learned(backend, Facts(version="2", models=(ModelCard("m"),)))
        assert await count(tokenization, "Hi") is NotCounted.UNVERIFIED
        assert not tokenization.counts_alike("m", "b0")
        await until_judged(tokenization)
        assert isinstance(await count(tokenization, "Hi"), list)


async def test_a_model_without_a_tokenizer_is_not_asked_for() -> None:
    async with counting(embeds()) as tokenization:
        assert not tokenization.configured("other")
        assert not tokenization.counts_alike("other", "b0")
        assert await tokenization.count("other", ["Hi"], 2, special=True) is NotCounted.UNVERIFIED


async def test_too_much_text_is_left_as_it_is() -> None:
    async with counting(embeds()) as tokenization:
        assert await count(tokenization, "Hi", size_bytes=BATCHES.max_bytes + 1) is NotCounted.TOO_LONG


async def test_after_texts_that_took_too_long_others_do_not_wait_for_a_while() -> None:
    async with counting(embeds(), batches=HASTY_BATCHES) as tokenization:
        assert await count(tokenization, SLOW) is NotCounted.LATE
        assert await count(tokenization, "Hi") is NotCounted.BUSY, "at once"
        await asyncio.sleep(HASTY_BATCHES.pause_seconds + SLOW_SECONDS)
        assert isinstance(await count(tokenization, "Hi"), list)


async def test_no_more_wait_than_are_soon_done() -> None:
    async with counting(embeds()) as tokenization:
        outcomes = await asyncio.gather(*(count(tokenization, SLOW) for _ in range(4)))
        assert outcomes[3] is NotCounted.BUSY
        assert all(isinstance(outcome, list) for outcome in outcomes[:3])
        assert tokenization._batches.waiting == 0


@pytest.mark.parametrize("text", ["#fails", DIES])
async def test_an_error_in_the_process_gives_no_tokens(text: str) -> None:
    async with counting(embeds()) as tokenization:
        assert await count(tokenization, "Hi", text) is NotCounted.FAILED
        assert tokenization._batches.waiting == 0


async def test_a_process_that_ends_while_texts_wait_is_replaced_and_embeddings_are_compared_again() -> None:
    async with counting(embeds()) as tokenization:
        outcomes = await asyncio.gather(count(tokenization, SLOW), count(tokenization, DIES), count(tokenization))
        assert isinstance(outcomes[0], list)
        assert outcomes[1:] == [NotCounted.FAILED] * 2
        while tokenization.counts_alike("m", "b0"):
            await asyncio.sleep(0)
        assert await count(tokenization, "Hi") is NotCounted.UNVERIFIED
        await until_judged(tokenization)
        assert isinstance(await count(tokenization, "Hi"), list)


async def test_a_batch_that_is_given_up_takes_no_place() -> None:
    async with counting(embeds()) as tokenization:
        loop = asyncio.get_running_loop()
        asking = [loop.create_task(count(tokenization, HANGS if number == 0 else "Hi")) for number in range(3)]
        await asyncio.sleep(0.05)  # two are with the process, one waits for its turn
        for task in asking:
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*asking, return_exceptions=True)
        )
        assert tokenization._batches.waiting == 0
