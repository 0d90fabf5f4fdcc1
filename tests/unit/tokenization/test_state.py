from gateway.tokenization.conversation import Feature
from gateway.tokenization.tokenization import ModelState, TokenizerVerdict


def verified(*features: Feature, counts: bool = False) -> TokenizerVerdict:
    return TokenizerVerdict("verified", "", frozenset(features), counts)


def test_features_are_those_verified_on_every_backend() -> None:
    model = ModelState("m", "/models/m")
    model.judged("a", verified(Feature.CHAT, Feature.TOOLS))
    assert model.features == {Feature.CHAT, Feature.TOOLS}
    model.judged("b", verified(Feature.CHAT, Feature.PARTS))
    assert model.features == {Feature.CHAT}
    model.judged("b", TokenizerVerdict("refused", "why"))
    assert model.features == {Feature.CHAT, Feature.TOOLS}
    model.judged("a", TokenizerVerdict())
    assert model.features == frozenset()


def test_with_the_tokenizer_all_that_was_seen_of_it_is_gone() -> None:
    model = ModelState("m", "/models/m", encoding="in segments")
    model.judged("a", verified(Feature.CHAT))
    model.unload()
    assert (model.encoding, model.features, model.verdict("a").state) == ("", frozenset(), "pending")


def test_an_operator_sees_each_backends_state_and_reason() -> None:
    model = ModelState("m", "/models/m", encoding="in segments")
    model.judged("a", verified(Feature.TOOLS, Feature.CHAT, counts=True))
    model.judged("b", TokenizerVerdict("refused", "from token 0 on"))
    assert model.as_dict() == {
        "model": "m",
        "tokenizer": "/models/m",
        "encoding": "in segments",
        "failure": "",
        "content_format": "string",
        "features": ["chat", "tools"],
        "backends": {
            "a": {"state": "verified", "reason": "", "features": ["chat", "tools"], "embeddings": True},
            "b": {"state": "refused", "reason": "from token 0 on", "features": [], "embeddings": False},
        },
    }
