from gateway.features.exact.conversation import PromptFeature
from gateway.features.exact.tokenization import ModelState, TokenizerVerdict


def verified(*features: PromptFeature, counts: bool = False) -> TokenizerVerdict:
    return TokenizerVerdict("verified", "", frozenset(features), counts)


def test_features_are_those_verified_on_every_backend() -> None:
    model = ModelState("m", "/models/m")
    model.judged("a", verified(PromptFeature.CHAT, PromptFeature.TOOLS))
    assert model.features == {PromptFeature.CHAT, PromptFeature.TOOLS}
    model.judged("b", verified(PromptFeature.CHAT, PromptFeature.PARTS))
    assert model.features == {PromptFeature.CHAT}
    model.judged("b", TokenizerVerdict("refused", "why"))
    assert model.features == {PromptFeature.CHAT, PromptFeature.TOOLS}
    model.judged("a", TokenizerVerdict())
    assert model.features == frozenset()


def test_with_the_tokenizer_all_that_was_seen_of_it_is_gone() -> None:
    model = ModelState("m", "/models/m", encoding="in segments")
    model.judged("a", verified(PromptFeature.CHAT))
    model.unload()
    assert (model.encoding, model.features, model.verdict("a").state) == ("", frozenset(), "pending")


def test_a_comparison_is_void_once_the_backend_or_the_tokenizer_has_restarted() -> None:
    model = ModelState("m", "/models/m", encoding="in segments")
    model.judged("a", TokenizerVerdict("pending", "timed out"))
    comparing = model.begin_comparison("a")
    assert comparing == model.verdict("a") == ("pending", "timed out", frozenset(), False)
    assert model.verdicts["a"] is comparing
    model.judged("a", TokenizerVerdict())
    assert model.verdicts["a"] is not comparing
    model.unload()
    assert "a" not in model.verdicts


def test_an_operator_sees_a_backends_state_and_reason() -> None:
    assert verified(PromptFeature.TOOLS, PromptFeature.CHAT, counts=True).as_dict() == {
        "state": "verified",
        "reason": "",
        "features": ["chat", "tools"],
        "embeddings": True,
    }
    refused = TokenizerVerdict("refused", "from token 0 on").as_dict()
    assert refused == {"state": "refused", "reason": "from token 0 on", "features": [], "embeddings": False}
