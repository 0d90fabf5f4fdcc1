"""A key whose cache is kept apart has a salt of its own on each route for which vLLM takes one."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.front.routes import Route
from gateway.core.request import InferenceRequest
from gateway.features.embeddings.inputs import EmbeddingInputs, Pairs
from gateway.features.keys.settings import KeyConfig
from tests.routes import ROUTES
from tests.unit.front.test_read import read

ANN, BOB = (KeyConfig(name=name, key=name, isolate_cache=True) for name in ("ann", "bob"))
CAT = KeyConfig(name="cat", key="cat")
TURNS = [{"role": "user", "content": "Hello."}]
BODIES: dict[bytes, dict[str, Any]] = {
    b"/v1/chat/completions": {"messages": TURNS},
    b"/v1/chat/completions/batch": {"messages": [TURNS]},
    b"/v1/completions": {"prompt": "a"},
    b"/v1/responses": {"input": "a"},
    b"/v1/messages": {"messages": TURNS, "max_tokens": 9},
    b"/v1/messages/count_tokens": {"messages": TURNS},
    b"/v1/embeddings": {"input": ["a", "b"]},
    b"/v2/embed": {"texts": ["a"], "input_type": "query", "embedding_types": ["float"]},
    b"/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
    b"/score": {"queries": "a", "documents": ["b", "c"]},
    b"/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    b"/rerank": {"query": "a", "documents": ["b", "c"]},
    b"/v2/rerank": {"query": "a", "documents": ["b", "c"]},
    b"/pooling": {"input": "a"},
    b"/classify": {"input": "a"},
    b"/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [1, 2]},
    b"/tokenize": {"prompt": "a"},
    b"/detokenize": {"tokens": [1]},
}
# vLLM's request models, by endpoint: `cache_salt` is one of their fields, or it is not.
MODELS = {
    "chat": "ChatCompletionRequest",
    "chat_batch": "BatchChatCompletionRequest",
    "completions": "CompletionRequest",
    "responses": "ResponsesRequest",
    "messages": "AnthropicMessagesRequest",
    "count_tokens": "AnthropicCountTokensRequest",
    "embeddings": "EmbeddingCompletionRequest",
    "embed": "CohereEmbedRequest",
    "score": "ScoreTextRequest",
    "rerank": "RerankRequest",
    "pooling": "PoolingCompletionRequest",
    "classify": "ClassificationCompletionRequest",
    "generative_scoring": "GenerativeScoringRequest",
    "tokenize": "TokenizeCompletionRequest",
    "detokenize": "DetokenizeRequest",
    "transcriptions": "TranscriptionRequest",
    "translations": "TranslationRequest",
}
WITHOUT = {"count_tokens", "embed", "tokenize", "detokenize", "transcriptions", "translations"}
VLLM = sorted(Path(__file__).resolve().parents[3].glob(".venv-vllm/lib/*/site-packages/vllm/entrypoints"))


def posted() -> Iterator[tuple[bytes, Route]]:
    """The routes whose bodies reach a backend."""
    for (method, path), route in ROUTES.items():
        if method == b"POST" and not route.local and not route.by_body:
            yield path, route


def bodies_of(request: InferenceRequest) -> list[dict[str, Any]]:
    """All that the request becomes: its body, and what is common to its parts."""
    found = [orjson.loads(request.body)]
    if isinstance(request.work, EmbeddingInputs):
        found.append(orjson.loads(request.work.template + b"0}"))
    if isinstance(request.work, Pairs):
        found.append(request.work.fields)
    return found


def test_the_table_says_for_each_route_what_vllm_takes() -> None:
    assert {route.endpoint: route.salted for _, route in posted()} == {name: name not in WITHOUT for name in MODELS}


@pytest.mark.skipif(not VLLM, reason="vLLM is not installed here (make test-vllm)")
@pytest.mark.parametrize(("endpoint", "model"), MODELS.items())
def test_the_installed_vllm_takes_it_there(endpoint: str, model: str) -> None:
    classes: dict[str, ast.ClassDef] = {}
    for path in VLLM[0].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)

    def has_it(name: str) -> bool:
        node = classes.get(name)
        if node is None:
            return False
        own = {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        return "cache_salt" in own or any(has_it(ast.unparse(base).partition("[")[0]) for base in node.bases)

    assert model in classes
    assert has_it(model) == (endpoint not in WITHOUT)


@pytest.mark.parametrize(("path", "route"), [each for each in posted() if each[0] in BODIES])
def test_an_isolated_key_has_its_own_salt_on_each_of_these_routes(path: bytes, route: Route) -> None:
    document = {"model": "m"} | BODIES[path]
    salts = []
    for key in (ANN, ANN, BOB, CAT, None):
        [salt] = {each.get("cache_salt") for each in bodies_of(read(document, path, key=key))}
        salts.append(salt)
    assert (salts[3], salts[4]) == (None, None)
    if route.salted:
        assert salts[0] == salts[1] != salts[2]
        assert len(salts[0]) == len(salts[2]) == 64
    else:
        assert salts == [None] * 5


@pytest.mark.parametrize(("path", "route"), [each for each in posted() if each[0] in BODIES and each[1].salted])
def test_the_salt_that_its_client_chose_is_kept_within_its_own(path: bytes, route: Route) -> None:
    documents = [{"model": "m"} | BODIES[path] | more for more in ({}, {"cache_salt": "x"}, {"cache_salt": "y"})]
    for key in (ANN, BOB):
        salts = [{each["cache_salt"] for each in bodies_of(read(document, path, key=key))} for document in documents]
        assert [len(each) for each in salts] == [1, 1, 1]
        assert len(set.union(*salts)) == 3
        assert not {"x", "y"} & set.union(*salts)


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/embeddings", b"/v1/rerank", b"/v1/completions"])
def test_the_endpoint_that_fields_choose_is_salted_as_well(path: bytes) -> None:
    body = {"model": "m"} | BODIES[path]
    assert len(orjson.loads(read(body, b"/invocations", key=ANN).body)["cache_salt"]) == 64


def test_each_route_has_a_body_here() -> None:
    assert {path for path, route in posted() if b"/audio/" not in path} == BODIES.keys()
