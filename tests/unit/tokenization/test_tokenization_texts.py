"""Several texts at once: told as token ids in bounded time, and only where every backend embeds both alike."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic

import pytest
from structlog.testing import capture_logs

from gateway.backends.backend import Facts, ModelCard
from gateway.tokenization.tokenization import Bounds, Encoded, NotEncoded, Tokenization
from tests.unit.backends.scripted import Answer, Scripted
from tests.unit.tokenization.backends import embeds, tokenizes
from tests.unit.tokenization.fake_worker import COMMAND, DIES, HANGS, SLOW_SECONDS
from tests.unit.tokenization.test_tokenization import DEADLINE_SECONDS, MODELS, PATIENT, fleet_of, until_judged

SLOW = "#slow"
PATIENT_BATCHES = PATIENT._replace(batch_wait_seconds=DEADLINE_SECONDS, max_batches=3)
HASTY_BATCHES = PATIENT_BATCHES._replace(batch_wait_seconds=0.05, pause_seconds=0.3)


@asynccontextmanager
async def encoding(*answers: Answer, bounds: Bounds = PATIENT_BATCHES) -> AsyncIterator[Tokenization]:
    """The tokenization of a fleet whose backends tokenize, and embed as told."""
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_SECONDS):
        servers = [await stack.enter_async_context(Scripted()) for _ in answers]
        for server, answer in zip(servers, answers, strict=True):
            server.answers |= {"/tokenize": tokenizes(), "/v1/embeddings": answer}
        fleet = fleet_of(*servers)
        tokenization = Tokenization(MODELS, fleet, monotonic, bounds, COMMAND)
        fleet.on_change.append(tokenization.look_again)
        fleet.on_restart.append(tokenization.forget)
        await stack.enter_async_context(tokenization)
        await until_judged(tokenization, len(answers))
        yield tokenization


async def encode(tokenization: Tokenization, *texts: str, size_bytes: int = 50) -> Encoded | NotEncoded:
    return await tokenization.encode("m", list(texts), size_bytes, special=True)


async def test_texts_are_told_as_lists_of_ids_and_counted() -> None:
    async with encoding(embeds(), embeds()) as tokenization:
        assert tokenization.configured("m")
        assert tokenization.embeds_alike("m", "b0")
        assert await encode(tokenization, "Hi", "") == Encoded([b"[1,72,105,2]", b"[1,2]"], [4, 2])
        bare = await tokenization.encode("m", ["Hi"], 2, special=False)
        assert bare == Encoded([b"[72,105]"], [2])
        totals = tokenization.totals()
    assert totals["encode_seconds"] > 0
    assert totals["encoded"] == 0, "those are prompts"


async def test_one_backend_that_embeds_otherwise_keeps_texts_texts_and_says_why() -> None:
    with capture_logs() as logs:
        async with encoding(embeds(), embeds(str.lower)) as tokenization:
            assert await encode(tokenization, "Hi") is NotEncoded.UNVERIFIED
            assert tokenization.accepted("m", "b1"), "its prompts are alike"
            [model] = tokenization.status()
    [differs] = [log for log in logs if log["event"] == "embeddings_of_tokens_differ"]
    assert (differs["backend"], differs["log_level"]) == ("b1", "warning")
    assert model["backends"]["b0"]["embeddings"]
    assert not model["backends"]["b1"]["embeddings"]
    assert model["backends"]["b1"]["reason"] == differs["reason"] != ""


async def test_a_backend_that_has_restarted_is_to_be_seen_again_before() -> None:
    async with encoding(embeds()) as tokenization:
        fleet = tokenization._fleet
        [backend] = fleet.backends
        fleet.learned(backend, Facts(version="2", models=(ModelCard("m"),)))
        assert await encode(tokenization, "Hi") is NotEncoded.UNVERIFIED
        assert not tokenization.embeds_alike("m", "b0")
        await until_judged(tokenization)
        assert isinstance(await encode(tokenization, "Hi"), Encoded)


async def test_a_model_without_a_tokenizer_is_not_asked_for() -> None:
    async with encoding(embeds()) as tokenization:
        assert not tokenization.configured("other")
        assert not tokenization.embeds_alike("other", "b0")
        assert await tokenization.encode("other", ["Hi"], 2, special=True) is NotEncoded.UNVERIFIED


async def test_too_much_text_is_left_as_it_is() -> None:
    async with encoding(embeds()) as tokenization:
        assert await encode(tokenization, "Hi", size_bytes=PATIENT.max_request_bytes + 1) is NotEncoded.TOO_LONG


async def test_after_texts_that_took_too_long_others_do_not_wait_for_a_while() -> None:
    async with encoding(embeds(), bounds=HASTY_BATCHES) as tokenization:
        assert await encode(tokenization, SLOW) is NotEncoded.LATE
        assert await encode(tokenization, "Hi") is NotEncoded.BUSY, "at once"
        await asyncio.sleep(HASTY_BATCHES.pause_seconds + SLOW_SECONDS)
        assert isinstance(await encode(tokenization, "Hi"), Encoded)


async def test_no_more_wait_than_are_soon_done() -> None:
    async with encoding(embeds()) as tokenization:
        outcomes = await asyncio.gather(*(encode(tokenization, SLOW) for _ in range(4)))
        assert outcomes[3] is NotEncoded.BUSY
        assert all(isinstance(outcome, Encoded) for outcome in outcomes[:3])
        assert tokenization._batches == 0


@pytest.mark.parametrize("text", ["#fails", DIES])
async def test_what_goes_wrong_in_the_process_is_not_told(text: str) -> None:
    async with encoding(embeds()) as tokenization:
        assert await encode(tokenization, "Hi", text) is NotEncoded.FAILED
        assert tokenization._batches == 0


async def test_a_process_that_ends_while_texts_wait_is_replaced_and_embeddings_are_compared_again() -> None:
    async with encoding(embeds()) as tokenization:
        outcomes = await asyncio.gather(encode(tokenization, SLOW), encode(tokenization, DIES), encode(tokenization))
        assert isinstance(outcomes[0], Encoded)
        assert outcomes[1:] == [NotEncoded.FAILED] * 2
        while tokenization.embeds_alike("m", "b0"):
            await asyncio.sleep(0)
        assert await encode(tokenization, "Hi") is NotEncoded.UNVERIFIED
        await until_judged(tokenization)
        assert isinstance(await encode(tokenization, "Hi"), Encoded)


async def test_a_batch_that_is_given_up_takes_no_place() -> None:
    async with encoding(embeds()) as tokenization:
        loop = asyncio.get_running_loop()
        asking = [loop.create_task(encode(tokenization, HANGS if number == 0 else "Hi")) for number in range(3)]
        await asyncio.sleep(0.05)  # two are with the process, one waits for its turn
        for task in asking:
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*asking, return_exceptions=True)
        )
        assert tokenization._batches == 0
