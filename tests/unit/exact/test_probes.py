import pytest

from gateway.features.exact.conversation import PROBES, ContentFormat, Probe, PromptFeature, read
from gateway.features.exact.tokenization import compare

FIRST = {feature: next(i for i, probe in enumerate(PROBES) if probe.feature is feature) for feature in PromptFeature}


def answers(changed: dict[int, list[int] | None] | None = None) -> list[list[int] | None]:
    """Tokens for every probe, all different, but for what is changed."""
    return [(changed or {}).get(number, [number, 1, 2, 3]) for number in range(len(PROBES))]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.feature)
@pytest.mark.parametrize("content_format", ContentFormat)
def test_every_probe_is_understood_and_tries_its_feature(probe: Probe, content_format: ContentFormat) -> None:
    reading = read(probe.endpoint, dict(probe.document), content_format)
    assert probe.feature in reading.features
    assert reading.features <= {probe.feature, PromptFeature.CHAT}


def test_every_feature_is_tried() -> None:
    assert {probe.feature for probe in PROBES} == set(PromptFeature)


def test_the_same_tokens_make_every_feature_alike() -> None:
    verdict = compare(answers(), answers())
    assert (verdict.state, verdict.features) == ("verified", frozenset(PromptFeature))


@pytest.mark.parametrize("feature", [PromptFeature.COMPLETION, PromptFeature.CHAT])
def test_texts_and_plain_conversations_must_be_alike(feature: PromptFeature) -> None:
    verdict = compare(answers(), answers({FIRST[feature]: [FIRST[feature], 1, 9, 3]}))
    assert verdict.state == "refused"
    assert verdict.reason.startswith(f"{feature}: different from token 2 on: gateway 2, backend 9; possible cause: ")


@pytest.mark.parametrize("feature", sorted(set(PromptFeature) - {PromptFeature.COMPLETION, PromptFeature.CHAT}))
def test_another_feature_that_differs_is_done_without(feature: PromptFeature) -> None:
    verdict = compare(answers(), answers({FIRST[feature]: [5]}))
    assert (verdict.state, verdict.features) == ("verified", frozenset(PromptFeature) - {feature})


def test_a_longer_prompt_is_another_one() -> None:
    verdict = compare(answers(), answers({0: [0, 1, 2, 3, 4]}))
    assert "gateway 4 tokens, backend 5" in verdict.reason


def test_what_both_refuse_says_nothing_and_what_one_refuses_does() -> None:
    system_turn = max(number for number, probe in enumerate(PROBES) if probe.feature is PromptFeature.CHAT)
    refusing = answers({system_turn: None})
    assert compare(refusing, refusing).features == set(PromptFeature)
    assert "only the gateway renders it" in compare(answers(), refusing).reason
    assert "only the backend renders it" in compare(refusing, answers()).reason


def test_a_model_without_a_template_has_texts_alone() -> None:
    texts = answers(
        {number: None for number, probe in enumerate(PROBES) if probe.feature is not PromptFeature.COMPLETION}
    )
    assert compare(texts, texts).features == {PromptFeature.COMPLETION}


def test_if_neither_side_renders_anything_nothing_is_alike() -> None:
    nothing: list[list[int] | None] = [None] * len(PROBES)
    assert compare(nothing, nothing).state == "refused"
