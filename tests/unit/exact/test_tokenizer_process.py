import asyncio
import json
import os
import sys
from array import array
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.features.exact.conversation import PromptFeature
from gateway.features.exact.tokenizer import Job, LoadTokenizer, ProcessEnded, TokenizerProcess, TokenizerReply
from tests.unit.exact.fake_worker import COMMAND, DIES, HANGS

EVERY = [feature.value for feature in PromptFeature]
PATIENT_SECONDS = 30.0


def completion(prompt: object) -> Job:
    return Job("m", "completions", {"prompt": prompt}, "string", EVERY)


def ids(text: str) -> bytes:
    return array("I", map(ord, text)).tobytes()


async def outcome_of(asking: Awaitable[TokenizerReply]) -> TokenizerReply | ProcessEnded:
    try:
        return await asking
    except ProcessEnded as error:
        return error


@asynccontextmanager
async def running() -> AsyncIterator[tuple[TokenizerProcess, asyncio.TaskGroup]]:
    process, started = TokenizerProcess(COMMAND), asyncio.Event()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        task = group.create_task(process.run(started.set))
        await started.wait()
        yield process, group
        task.cancel()


async def load(process: TokenizerProcess) -> None:
    assert (await process.ask(LoadTokenizer("m", "x"), PATIENT_SECONDS)).tokens == b""


async def test_many_questions_at_once_get_their_own_answers() -> None:
    async with running() as (process, _):
        await load(process)
        texts = [f"prompt {number}" for number in range(50)]
        answers = await asyncio.gather(*(process.ask(completion(text), PATIENT_SECONDS) for text in texts))
        assert [answer.tokens for answer in answers] == list(map(ids, texts))


async def test_a_cancelled_caller_blocks_no_other() -> None:
    async with running() as (process, group):
        await load(process)
        leaving = [group.create_task(process.ask(completion("#slow"), PATIENT_SECONDS)) for _ in range(4)]
        await asyncio.sleep(0)
        for caller in leaving:
            caller.cancel()
        assert (await process.ask(completion("last"), PATIENT_SECONDS)).tokens == ids("last")
        assert all(caller.cancelled() for caller in leaving)


async def test_when_the_process_dies_all_callers_get_an_error() -> None:
    async with running() as (process, _):
        await load(process)
        prompts = (DIES, *"abcde")
        asked = [process.ask(completion(prompt), PATIENT_SECONDS) for prompt in prompts]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(outcome, ProcessEnded) for outcome in outcomes)
        with pytest.raises(ProcessEnded):
            await process.ask(completion("later"), PATIENT_SECONDS)


async def test_a_process_that_hangs_is_ended() -> None:
    async with running() as (process, _):
        await load(process)
        with pytest.raises(ProcessEnded):
            await process.ask(completion(HANGS), hung_seconds=0.05)


async def test_a_question_that_cannot_be_sent_takes_no_turn() -> None:
    async with running() as (process, _):
        await load(process)
        for _ in range(5):
            with pytest.raises(OverflowError):
                await process.ask(completion(1 << 70), PATIENT_SECONDS)
        assert (await process.ask(completion("x"), PATIENT_SECONDS)).tokens == ids("x")


async def test_cancelling_ends_the_process_and_who_waits_for_it() -> None:
    async with running() as (process, group):
        asking = group.create_task(outcome_of(process.ask(completion("x"), PATIENT_SECONDS)))
        await asyncio.sleep(0)
        started = process._process
    assert isinstance(asking.result(), ProcessEnded)
    assert started is not None
    assert started.returncode is not None


async def test_a_command_that_does_not_exist_is_an_os_error() -> None:
    with pytest.raises(OSError, match="nowhere"):
        await TokenizerProcess(("/nowhere/python", sys.executable)).run(lambda: None)


async def test_who_is_cancelled_while_a_dead_process_is_waited_for_leaves_nothing_behind() -> None:
    process, started = TokenizerProcess(COMMAND), asyncio.Event()
    async with asyncio.timeout(30):
        using = asyncio.get_running_loop().create_task(process.run(started.set))
        await started.wait()
        child = process._process
        assert child is not None
        child.kill()
        while process._process is not None:
            await asyncio.sleep(0)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        assert child.returncode is not None


WRITES = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


async def test_the_process_gets_no_secret_of_the_gateways_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("BACKEND_KEY", "GATEWAY__AUTH__CACHE_SALT_SECRET", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret-canary")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    async with asyncio.timeout(30):
        await TokenizerProcess((sys.executable, "-c", WRITES, str(tmp_path / "seen"))).run(lambda: None)
    environment = json.loads((tmp_path / "seen").read_text())
    assert "secret-canary" not in environment.values()
    assert (environment["HF_HOME"], environment["HTTPS_PROXY"]) == ("/models", "http://proxy")
    assert environment["PATH"] == os.environ["PATH"]
