import time
from random import Random

import pytest

from gateway.config import HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.settings import BackendConfig
from gateway.core.backends.vllm_api import ControlClient, ControlError
from gateway.features.exact.conversation import EMBEDDED, ContentFormat, Probe, PromptFeature
from gateway.features.exact.tokenization import NOT_COMPARABLE, TokenizerVerdict, best_format, compared, counted_alike
from tests.unit.backends.scripted import Answer, Scripted, hang, json_answer
from tests.unit.exact.backends import embeds, tokenizes
from tests.unit.exact.fake_worker import letters_of


async def ours(probe: Probe, content_format: ContentFormat) -> list[int]:
    return list(map(ord, letters_of(probe.endpoint, dict(probe.document), content_format)))


async def compared_with(answer: Answer | None) -> dict[ContentFormat, TokenizerVerdict]:
    async with Scripted() as server, ControlClient(0.5, time.monotonic) as client:
        if answer is not None:
            server.answers["/tokenize"] = answer
        backend = Backend(0, BackendConfig(url=server.url, api_key="sk-1"), health=HealthConfig(), random=Random(1))
        verdicts = await compared("m", backend, client, ours)
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-1"}
        return verdicts


@pytest.mark.parametrize("content_format", ContentFormat)
async def test_the_format_that_the_backend_uses_is_found(content_format: ContentFormat) -> None:
    verdicts = await compared_with(tokenizes(content_format))
    assert best_format(verdicts) is content_format
    assert verdicts[content_format].features == frozenset(PromptFeature)


async def test_a_backend_with_other_tokens_is_like_none_of_the_formats() -> None:
    verdicts = await compared_with(tokenizes(shift=1))
    assert {verdict.state for verdict in verdicts.values()} == {"refused"}


async def test_a_prompt_that_the_backend_refuses_differs_in_its_feature_alone() -> None:
    verdicts = await compared_with(tokenizes(without=("tools",)))
    assert verdicts[ContentFormat.STRING].features == frozenset(PromptFeature) - {PromptFeature.TOOLS}


@pytest.mark.parametrize(
    "answer", [None, json_answer({}), json_answer([]), json_answer({"tokens": "1"}), json_answer({"tokens": [1, True]})]
)
async def test_a_backend_that_exposes_no_tokens_cannot_be_compared(answer: Answer | None) -> None:
    with pytest.raises(ControlError, match="/tokenize") as raised:
        await compared_with(answer)
    assert raised.value.status in NOT_COMPARABLE


@pytest.mark.parametrize("answer", [hang, json_answer({}, 503), json_answer({}, 401)])
async def test_a_backend_that_does_not_answer_now_may_be_asked_again(answer: Answer) -> None:
    with pytest.raises(ControlError, match="/tokenize") as raised:
        await compared_with(answer)
    assert raised.value.status not in NOT_COMPARABLE


def test_of_two_formats_that_do_alike_the_first_is_taken() -> None:
    alike = TokenizerVerdict("verified", features=frozenset((PromptFeature.CHAT,)))
    assert best_format(dict.fromkeys(ContentFormat, alike)) is ContentFormat.STRING
    differs = TokenizerVerdict("refused", "otherwise")
    assert best_format({ContentFormat.STRING: differs, ContentFormat.PARTS: alike}) is ContentFormat.PARTS


async def counted_by(answer: Answer | None) -> tuple[bool, str]:
    async with Scripted() as server, ControlClient(0.5, time.monotonic) as client:
        if answer is not None:
            server.answers["/v1/embeddings"] = answer
        backend = Backend(0, BackendConfig(url=server.url), health=HealthConfig(), random=Random(1))
        return await counted_alike("m", backend, client, [len(text) + 2 for text in EMBEDDED])


async def test_a_backend_may_count_what_it_embeds_alike() -> None:
    assert await counted_by(embeds()) == (True, "")


@pytest.mark.parametrize("answer", [embeds(str.lower), embeds(lambda text: text + "!"), embeds(more_tokens=-1)])
async def test_a_backend_that_counts_otherwise_says_how(answer: Answer) -> None:
    alike, difference = await counted_by(answer)
    assert not alike
    assert "/v1/embeddings counts" in difference


@pytest.mark.parametrize("answer", [None, json_answer({}, 400), json_answer({}, 500)])
async def test_a_backend_that_embeds_nothing_differs_in_nothing(answer: Answer | None) -> None:
    assert await counted_by(answer) == (False, "")


@pytest.mark.parametrize("document", [[], {}, {"usage": None}, {"usage": []}])
async def test_an_answer_without_usage_is_no_count(document: object) -> None:
    assert await counted_by(json_answer(document)) == (False, "/v1/embeddings returned no usage")


@pytest.mark.parametrize("answer", [hang, json_answer({}, 503), json_answer({}, 429)])
async def test_a_backend_that_embeds_nothing_just_now_may_be_asked_again(answer: Answer) -> None:
    with pytest.raises(ControlError, match="/v1/embeddings"):
        await counted_by(answer)
