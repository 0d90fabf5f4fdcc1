import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.config import ConfigError, HealthConfig
from gateway.config.file import parse
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.settings import BackendConfig
from gateway.features.exact import tokenization as module
from gateway.features.exact.conversation import PROBES
from gateway.features.exact.tokenization import DEFAULT_LIMITS, Tokenization, TokenizerLimits
from gateway.features.exact.tokenizer import TokenizerProcess
from gateway.features.models.settings import ModelConfig, ModelsConfig
from tests.unit.backends.scripted import Scripted, json_answer
from tests.unit.exact.backends import tokenizes
from tests.unit.exact.fake_worker import COMMAND, DIES, HANGS, letters_of

MODELS = ModelsConfig(m=ModelConfig(tokenizer="x"))
DEADLINE_SECONDS = 30.0
PROMPTS = DEFAULT_LIMITS.prompts._replace(wait_seconds=DEADLINE_SECONDS)
PATIENT = TokenizerLimits(prompts=PROMPTS, retry_seconds=0.02, restart_seconds=0.02)
HASTY = PATIENT._replace(prompts=PROMPTS._replace(wait_seconds=0.05, max_waiting=3))
PROMPT = {"prompt": "Hi", "max_tokens": 5}


def fleet_of(*servers: Scripted) -> Fleet:
    backends = [BackendConfig(url=server.url, name=f"b{number}") for number, server in enumerate(servers)]
    fleet = Fleet(backends, HealthConfig(), clock=time.monotonic, random=Random(1))
    for backend in fleet.backends:
        fleet.learned(backend, Facts(version="1", models=(ModelCard("m"),)))
    return fleet


@asynccontextmanager
async def tokenizing(
    *answers: Any, models: ModelsConfig = MODELS, limits: TokenizerLimits = PATIENT
) -> AsyncIterator[tuple[Tokenization, Fleet]]:
    """The tokenization of a fleet whose backends answer /tokenize as given."""
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_SECONDS):
        servers = [await stack.enter_async_context(Scripted()) for _ in answers]
        for server, answer in zip(servers, answers, strict=True):
            server.answers["/tokenize"] = answer
        fleet = fleet_of(*servers)
        tokenization = Tokenization(models, fleet, time.monotonic, limits=limits, process=TokenizerProcess(COMMAND))
        fleet.on_change.append(tokenization.look_again)
        fleet.on_restart.append(tokenization.forget)
        yield await stack.enter_async_context(tokenization), fleet


def states_of(tokenization: Tokenization) -> dict[str, str]:
    """By backend; those that were never compared are left out."""
    [model] = tokenization._models.values()
    return {name: verdict.state for name, verdict in model.verdicts.items()}


async def until_judged(tokenization: Tokenization, count: int = 1) -> dict[str, str]:
    """The backends' states, when so many of them are verified or refused."""
    while True:
        states = states_of(tokenization)
        if sum(state != "pending" for state in states.values()) >= count:
            return states
        await asyncio.sleep(0.01)


def ids(text: str) -> bytes:
    return array("I", map(ord, text)).tobytes()


async def test_a_backend_that_does_alike_is_accepted_and_prompts_are_tokenized() -> None:
    with capture_logs() as logs:
        async with tokenizing(tokenizes()) as (tokenization, _):
            assert "m" not in tokenization
            assert await tokenization.token_bytes("m", PROMPT, "completions", 50) is None, "no backend is verified yet"
            assert await until_judged(tokenization) == {"b0": "verified"}
            assert "m" in tokenization
            assert tokenization.accepted("m", "b0")
            assert await tokenization.token_bytes("m", PROMPT, "completions", 50) == ids("Hi")
            document = {"messages": [{"role": "user", "content": "Hi"}]}
            expected = ids(letters_of("chat", document, "string"))
            assert await tokenization.token_bytes("m", document, "chat", 50) == expected
            totals = tokenization.totals
    assert totals["encoded"] == sum(totals.values()) == 2
    assert [log["event"] for log in logs] == ["tokenizer_loaded", "tokens_verified"]


async def test_a_backend_that_does_otherwise_is_refused_for_all_to_see() -> None:
    with capture_logs() as logs:
        async with tokenizing(tokenizes(shift=1), tokenizes()) as (tokenization, _):
            assert await until_judged(tokenization, 2) == {"b0": "refused", "b1": "verified"}
            assert not tokenization.accepted("m", "b0")
            assert await tokenization.token_bytes("m", PROMPT, "completions", 50) == ids("Hi"), "for the other one"
            shown = tokenization.verdicts("b0")
            assert tokenization.verdicts("unknown") == {}
    [refused] = [log for log in logs if log["event"] == "tokens_refused"]
    assert (refused["model"], refused["backend"], refused["log_level"]) == ("m", "b0", "warning")
    assert "from token 0 on" in refused["reason"]
    assert shown == {"m": {"state": "refused", "reason": refused["reason"], "features": [], "embeddings": False}}


async def test_a_backend_without_tokenize_is_refused() -> None:
    async with tokenizing(json_answer({"detail": "Not Found"}, 404)) as (tokenization, _):
        assert await until_judged(tokenization) == {"b0": "refused"}
        assert "m" not in tokenization


async def test_a_feature_that_differs_on_one_backend_is_used_for_none() -> None:
    document = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    async with tokenizing(tokenizes(), tokenizes(without=("tools",))) as (tokenization, _):
        assert await until_judged(tokenization, 2) == {"b0": "verified", "b1": "verified"}
        assert await tokenization.token_bytes("m", document, "chat", 50) is None
        assert await tokenization.token_bytes("m", {"messages": document["messages"]}, "chat", 50) is not None
        assert tokenization.totals["unknown"] == 1


async def test_a_backend_that_has_restarted_is_compared_again() -> None:
    async with tokenizing(tokenizes()) as (tokenization, fleet):
        await until_judged(tokenization)
        [backend] = fleet.backends
        fleet.learned(backend, Facts(version="2", models=(ModelCard("m"),)))
        assert not tokenization.accepted("m", "b0"), "at once"
        assert "m" not in tokenization
        assert await until_judged(tokenization) == {"b0": "verified"}


async def test_a_restart_during_the_comparison_makes_it_void() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()
    plain, requests = tokenizes(), 0

    async def slow(request: Any) -> Any:
        nonlocal requests
        requests += 1
        asked.set()
        await go_on.wait()
        return await plain(request)

    async with tokenizing(slow) as (tokenization, fleet):
        await asked.wait()
        tokenization.forget(fleet.backends[0])
        go_on.set()
        assert await until_judged(tokenization) == {"b0": "verified"}
        assert requests == 2 * len(PROBES)


async def test_a_backend_that_lists_the_model_later_is_compared_then() -> None:
    async with tokenizing(tokenizes()) as (tokenization, fleet):
        await until_judged(tokenization)
        [backend] = fleet.backends
        fleet.learned(backend, Facts(version="1"))
        tokenization.forget(backend)
        fleet.learned(backend, Facts(version="1", models=(ModelCard("m"),)))
        assert await until_judged(tokenization) == {"b0": "verified"}


async def test_a_backend_that_does_not_answer_is_asked_again() -> None:
    plain, times = tokenizes(), iter(range(100))

    async def at_last(request: Any) -> Any:
        return await (json_answer({}, 503) if next(times) < 2 else plain)(request)

    async with tokenizing(at_last) as (tokenization, _):
        assert await until_judged(tokenization) == {"b0": "verified"}


async def test_a_process_that_dies_is_replaced_and_everything_is_compared_again() -> None:
    with capture_logs() as logs:
        async with tokenizing(tokenizes()) as (tokenization, _):
            await until_judged(tokenization)
            assert await tokenization.token_bytes("m", {"prompt": DIES}, "completions", 50) is None
            while "m" in tokenization:
                await asyncio.sleep(0)
            await until_judged(tokenization)
            assert await tokenization.token_bytes("m", PROMPT, "completions", 50) == ids("Hi")
            assert tokenization.totals["failed"] == 1
    assert "tokenizer_process_ended" in [log["event"] for log in logs]


async def test_a_tokenizer_that_cannot_be_loaded_is_logged_once() -> None:
    models = ModelsConfig(m=ModelConfig(tokenizer="missing"))
    with capture_logs() as logs:
        async with tokenizing(tokenizes(), models=models) as (tokenization, _):
            while not tokenization._models["m"].failure:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert "m" not in tokenization
    assert [(log["event"], log["reason"]) for log in logs] == [("tokenizer_not_loaded", "missing cannot be loaded")]


async def test_a_prompt_that_takes_too_long_is_given_up() -> None:
    async with tokenizing(tokenizes(), limits=HASTY) as (tokenization, _):
        await until_judged(tokenization)
        assert await tokenization.token_bytes("m", {"prompt": HANGS}, "completions", 50) is None
        assert tokenization.totals["late"] == 1


async def test_when_too_many_wait_a_prompt_is_given_up_at_once() -> None:
    async with tokenizing(tokenizes(), limits=HASTY) as (tokenization, _):
        await until_judged(tokenization)
        asked = [tokenization.token_bytes("m", {"prompt": HANGS}, "completions", 50) for _ in range(5)]
        assert await asyncio.gather(*asked) == [None] * 5
        assert (tokenization.totals["late"], tokenization.totals["busy"]) == (3, 2)
        assert tokenization._prompts.waiting == 0


@pytest.mark.parametrize(
    ("model", "endpoint", "document", "size_bytes", "counter"),
    [
        ("other", "chat", {"messages": []}, 50, None),
        ("m", "responses", {"input": "Hi"}, 50, None),
        ("m", "completions", PROMPT, PROMPTS.max_bytes + 1, "too_long"),
        ("m", "completions", {"prompt": "#fails"}, 50, "failed"),
        ("m", "completions", {"prompt": 1 << 70}, 50, "failed"),
        ("m", "completions", {"prompt": [1, 2]}, 50, "unknown"),
    ],
)
async def test_an_unsupported_prompt_gives_none_and_is_counted(
    model: str, endpoint: str, document: dict[str, Any], size_bytes: int, counter: str | None
) -> None:
    async with tokenizing(tokenizes()) as (tokenization, _):
        await until_judged(tokenization)
        before = dict(document)
        assert await tokenization.token_bytes(model, document, endpoint, size_bytes) is None
        assert document == before
        counted = {name for name, value in tokenization.totals.items() if value}
        assert counted == ({counter} if counter else set())


async def test_a_caller_who_leaves_is_not_counted_as_waiting() -> None:
    async with tokenizing(tokenizes()) as (tokenization, _):
        await until_judged(tokenization)
        loop = asyncio.get_running_loop()
        asking = loop.create_task(tokenization.token_bytes("m", {"prompt": HANGS}, "completions", 50))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert tokenization._prompts.waiting == 0


async def test_without_a_configured_tokenizer_nothing_is_started() -> None:
    async with tokenizing(tokenizes(), models=ModelsConfig(m=ModelConfig())) as (tokenization, _):
        assert tokenization._process._process is None
        assert tokenization.verdicts("b0") == {}
        assert not tokenization.accepted("m", "b0")
        assert await tokenization.token_bytes("m", PROMPT, "completions", 50) is None


def test_a_missing_library_is_an_error_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.settings.find_spec", {}.get)
    with pytest.raises(ConfigError, match=r"models\.m\.tokenizer: .*pip install"):
        parse({"backends": [{"url": "http://a:1"}], "models": {"m": {"tokenizer": "folder"}}})


async def test_a_real_tokenizer_is_verified_with_a_backend_that_has_it(folder: str) -> None:
    from gateway.features.exact.tokenizer import ModelTokenizer

    real = ModelTokenizer(folder, 1 << 20)

    async def answer(request: Any) -> Any:
        document = await request.json()
        endpoint = "completions" if "prompt" in document else "chat"
        tokens = real.tokens(endpoint, document, "string", [*module.PromptFeature])
        return await json_answer({"tokens": array("I", tokens).tolist()})(request)

    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_SECONDS):
        server = await stack.enter_async_context(Scripted())
        server.answers["/tokenize"] = answer
        models = ModelsConfig(m=ModelConfig(tokenizer=folder))
        tokenization = await stack.enter_async_context(
            Tokenization(models, fleet_of(server), time.monotonic, limits=PATIENT)
        )
        assert await until_judged(tokenization) == {"b0": "verified"}
        document = {"messages": [{"role": "user", "content": "Hi"}]}
        assert await tokenization.token_bytes("m", document, "chat", 50) == real.tokens(
            "chat", document, "string", [*module.PromptFeature]
        )


async def test_tokenizers_follow_a_reload_and_one_that_stays_remains_verified() -> None:
    async with tokenizing(tokenizes()) as (tokenization, _):
        await until_judged(tokenization)
        state = tokenization._models["m"]
        tokenization.apply(ModelsConfig(m=ModelConfig(tokenizer="x"), n=ModelConfig(tokenizer="y")))
        assert tokenization._models["m"] is state
        assert "m" in tokenization
        assert tokenization.configured("n")
        tokenization.apply(ModelsConfig())
        assert not tokenization.is_used
        while tokenization._process._process is not None:
            await asyncio.sleep(0.01)
        tokenization.apply(MODELS)
        assert "m" not in tokenization
        assert await until_judged(tokenization) == {"b0": "verified"}
