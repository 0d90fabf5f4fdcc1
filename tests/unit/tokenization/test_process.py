import asyncio
import json
import os
import sys
from array import array

import pytest

from gateway.tokenization.conversation import Feature
from gateway.tokenization.process import Job, LoadTokenizer, ProcessEnded, TokenizerProcess, running
from tests.unit.tokenization.fake_worker import COMMAND, DIES, HANGS

EVERY = [feature.value for feature in Feature]
PATIENT_SECONDS = 30.0


def completion(prompt: object) -> Job:
    return Job("m", "completions", {"prompt": prompt}, "string", EVERY)


def ids(text: str) -> bytes:
    return array("I", map(ord, text)).tobytes()


async def load(process: TokenizerProcess) -> None:
    assert (await process.ask(LoadTokenizer("m", "x"), PATIENT_SECONDS)).tokens == b""


async def test_many_questions_at_once_get_their_own_answers() -> None:
    async with asyncio.timeout(30), running(COMMAND) as process, asyncio.TaskGroup() as group:
        listening = group.create_task(process.listen())
        await load(process)
        texts = [f"prompt {number}" for number in range(50)]
        answers = await asyncio.gather(*(process.ask(completion(text), PATIENT_SECONDS) for text in texts))
        assert [answer.tokens for answer in answers] == list(map(ids, texts))
        listening.cancel()


async def test_a_cancelled_caller_blocks_no_other() -> None:
    async with asyncio.timeout(30), running(COMMAND) as process, asyncio.TaskGroup() as group:
        listening = group.create_task(process.listen())
        await load(process)
        leaving = [group.create_task(process.ask(completion("#slow"), PATIENT_SECONDS)) for _ in range(4)]
        await asyncio.sleep(0)
        for caller in leaving:
            caller.cancel()
        assert (await process.ask(completion("last"), PATIENT_SECONDS)).tokens == ids("last")
        assert all(caller.cancelled() for caller in leaving)
        listening.cancel()


async def test_when_the_process_dies_all_callers_get_an_error() -> None:
    async with asyncio.timeout(30), running(COMMAND) as process, asyncio.TaskGroup() as group:
        group.create_task(process.listen())
        await load(process)
        prompts = (DIES, *"abcde")
        asked = [process.ask(completion(prompt), PATIENT_SECONDS) for prompt in prompts]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(outcome, ProcessEnded) for outcome in outcomes)
        with pytest.raises(ProcessEnded):
            await process.ask(completion("later"), PATIENT_SECONDS)


async def test_a_process_that_hangs_is_ended() -> None:
    async with asyncio.timeout(30), running(COMMAND) as process, asyncio.TaskGroup() as group:
        group.create_task(process.listen())
        await load(process)
        with pytest.raises(ProcessEnded):
            await process.ask(completion(HANGS), hung_seconds=0.05)


async def test_a_question_that_cannot_be_sent_takes_no_turn() -> None:
    async with asyncio.timeout(30), running(COMMAND) as process, asyncio.TaskGroup() as group:
        listening = group.create_task(process.listen())
        await load(process)
        for _ in range(5):
            with pytest.raises(OverflowError):
                await process.ask(completion(1 << 70), PATIENT_SECONDS)
        assert (await process.ask(completion("x"), PATIENT_SECONDS)).tokens == ids("x")
        listening.cancel()


async def test_leaving_the_block_ends_the_process_and_who_waits_for_it() -> None:
    async with asyncio.timeout(30):
        async with running(COMMAND) as process:
            asking = asyncio.get_running_loop().create_task(process.ask(completion("x"), PATIENT_SECONDS))
            await asyncio.sleep(0)
        with pytest.raises(ProcessEnded):
            await asking
        assert process._process.returncode is not None


async def test_a_command_that_does_not_exist_is_an_os_error() -> None:
    with pytest.raises(OSError, match="nowhere"):
        async with running(("/nowhere/python", sys.executable)):
            raise AssertionError("never reached")


async def test_who_is_cancelled_while_a_dead_process_is_waited_for_leaves_nothing_behind() -> None:
    async def use() -> None:
        async with running(COMMAND) as process:
            started.append(process)
            await process.listen()

    started: list[TokenizerProcess] = []
    async with asyncio.timeout(30):
        using = asyncio.get_running_loop().create_task(use())
        while not started:
            await asyncio.sleep(0)
        started[0]._kill()
        while not started[0]._questions.is_closing():
            await asyncio.sleep(0)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        assert started[0]._process.returncode is not None


PRINTS = (sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))")


async def test_the_process_gets_no_secret_of_the_gateways_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BACKEND_KEY", "GATEWAY__AUTH__CACHE_SALT_SECRET", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret-canary")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    async with asyncio.timeout(30), running(PRINTS) as process:
        environment = json.loads(await process._answers.readline())
    assert "secret-canary" not in environment.values()
    assert (environment["HF_HOME"], environment["HTTPS_PROXY"]) == ("/models", "http://proxy")
    assert environment["PATH"] == os.environ["PATH"]
