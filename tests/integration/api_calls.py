"""Every call that the gateway answers: of the OpenAI SDK and of vLLM's own routes, each with the proof that it works.

docs/api.md is made of this table, and `test_api.py` runs each proof on the engines that `Call.proved_on` names. On
other engines the call must end with the error that says that the engine does not offer it.
"""

import asyncio
import base64
import io
import json
import wave
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from openai import AsyncOpenAI, ConflictError
from websockets import InvalidStatus

from tests.integration.fleet import CHAT_MODEL, EMBEDDING_MODEL, Fleet
from tests.integration.gateway_process import Gateway
from tests.integration.prompts import ENDLESS_TOKENS, chat, fresh, text_of
from tests.realtime_engine import RealtimeEngine

BOTH, SIMULATED, REAL = "simulated and real vLLM", "simulated vLLM", "real vLLM"
PEER = "a peer that speaks vLLM's protocol"
SPEECH_MODEL = "a speech model, for example Whisper"
CLASSIFIER = "a classification model"
KEEPS = "needs `batches.path` ([batches.md](batches.md)); else refused: 404 `unknown_url`"


@dataclass(frozen=True)
class Scene:
    """What a proof uses: the SDK on the gateway, the gateway's URL, and the engines behind it."""

    client: AsyncOpenAI
    url: str
    fleet: Fleet
    start_gateway: Callable[..., AbstractContextManager[Gateway]]

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer of a route that the SDK has no method for."""
        return await self.client.post(f"{self.url}{path}", cast_to=object, body=body)

    async def get(self, path: str) -> Any:
        """The answer of a route that the SDK has no method for."""
        return await self.client.get(f"{self.url}{path}", cast_to=object)


Proof = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True)
class Call:
    """One call that works. `name`: as the SDK has it, or else the method and path."""

    name: str
    route: str
    proof: Proof
    note: str = ""
    proved_on: str = BOTH


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
COLOUR = {
    "type": "json_schema",
    "json_schema": {
        "name": "colour",
        "schema": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
PAIR = {"model": EMBEDDING_MODEL, "text_1": "a cat", "text_2": ["a dog", "a mat"]}
DOCUMENTS = {"model": EMBEDDING_MODEL, "query": "a cat", "documents": ["a dog", "a mat"]}
MESSAGES = [{"role": "user", "content": "Name three colours."}]
BRIEF = {"max_tokens": 4, "temperature": 0}


def silence(seconds: float = 0.1) -> tuple[str, bytes]:
    """A sound file of 16 kHz."""
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        sound.writeframes(bytes(2 * int(16000 * seconds)))
    return "silence.wav", out.getvalue()


# Chats and completions.


async def chat_is_answered(scene: Scene) -> None:
    answer = await scene.client.chat.completions.create(**chat(tokens=5))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


async def chat_streams(scene: Scene) -> None:
    stream = await scene.client.chat.completions.create(**chat(tokens=5), stream=True)
    assert text_of([chunk async for chunk in stream])


async def chat_stream_helper(scene: Scene) -> None:
    async with scene.client.chat.completions.stream(**chat(tokens=5)) as stream:
        events = [event async for event in stream]
    assert [event.type for event in events][-1] == "content.done"


async def tool_is_called(scene: Scene) -> None:
    """Warm, because a model with random weights repeats itself when cold, and its white space is not limited here."""
    request = chat(tokens=800, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})
    answer = await scene.client.chat.completions.create(**{**request, "temperature": 2, "seed": 1, "extra_body": {}})
    [call] = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


async def format_is_kept(scene: Scene) -> None:
    request = chat(tokens=60, response_format=COLOUR)
    answer = await scene.client.chat.completions.create(**{**request, "extra_body": {}})
    assert json.loads(answer.choices[0].message.content or "")["colour"] in ("red", "green")


async def completion_is_answered(scene: Scene) -> None:
    request: dict[str, Any] = {"model": CHAT_MODEL, "prompt": fresh(), **BRIEF}
    assert (await scene.client.completions.create(**request)).object == "text_completion"
    stream = await scene.client.completions.create(**request, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream])


async def batch_of_chats(scene: Scene) -> None:
    body = {"model": CHAT_MODEL, "messages": [MESSAGES, MESSAGES], **BRIEF}
    assert len((await scene.post("/v1/chat/completions/batch", body))["choices"]) == 2


async def message_is_answered(scene: Scene) -> None:
    body = {"model": CHAT_MODEL, "messages": MESSAGES, **BRIEF}
    assert (await scene.post("/v1/messages", body))["type"] == "message"


async def message_is_counted(scene: Scene) -> None:
    counted = await scene.post("/v1/messages/count_tokens", {"model": CHAT_MODEL, "messages": MESSAGES})
    assert counted["input_tokens"] > 0


# Responses.

RESPONSE: dict[str, Any] = {"model": CHAT_MODEL, "input": "Name three colours.", "max_output_tokens": 6}


async def response_is_created(scene: Scene) -> None:
    assert (await scene.client.responses.create(**RESPONSE)).object == "response"


async def response_streams(scene: Scene) -> None:
    stream = await scene.client.responses.create(**RESPONSE, stream=True)
    assert [event.type async for event in stream][-1] == "response.completed"


async def response_is_retrieved(scene: Scene) -> None:
    made = await scene.client.responses.create(**RESPONSE)
    found = await scene.client.responses.retrieve(made.id, include=["message.output_text.logprobs"])
    assert found.output_text == made.output_text


async def response_is_continued(scene: Scene) -> None:
    made = await scene.client.responses.create(**RESPONSE)
    more = await scene.client.responses.create(**{**RESPONSE, "input": "And then?"}, previous_response_id=made.id)
    assert more.previous_response_id == made.id


async def response_runs_in_the_background(scene: Scene) -> None:
    made = await scene.client.responses.create(**RESPONSE, background=True)
    assert made.status == "queued"
    while (found := await scene.client.responses.retrieve(made.id)).status == "queued":
        await asyncio.sleep(0.05)
    assert found.output_text


async def response_is_cancelled(scene: Scene) -> None:
    endless = {**RESPONSE, "max_output_tokens": ENDLESS_TOKENS, "extra_body": {"ignore_eos": True}}
    made = await scene.client.responses.create(**endless, background=True)
    assert (await scene.client.responses.cancel(made.id)).status == "cancelled"


async def response_stream_is_resumed(scene: Scene) -> None:
    stream = await scene.client.responses.create(**RESPONSE, background=True, stream=True)
    events = [event async for event in stream]
    opening: Any = events[0]
    resumed = await scene.client.responses.retrieve(opening.response.id, stream=True, starting_after=2)
    assert [event.sequence_number async for event in resumed] == [event.sequence_number for event in events[3:]]


# Embeddings, scores, tokens.


async def embedding_is_made(scene: Scene) -> None:
    answer = await scene.client.embeddings.create(model=EMBEDDING_MODEL, input=["a cat", "a mat"])
    assert len(answer.data) == 2


async def cohere_embedding(scene: Scene) -> None:
    answer = await scene.post("/v2/embed", {"model": EMBEDDING_MODEL, "texts": ["a cat", "a mat"]})
    assert len(answer["embeddings"]["float"]) == 2


async def text_is_pooled(scene: Scene) -> None:
    assert len((await scene.post("/pooling", {"model": EMBEDDING_MODEL, "input": "a cat"}))["data"]) == 1


async def text_is_classified(scene: Scene) -> None:
    assert len((await scene.post("/classify", {"model": EMBEDDING_MODEL, "input": "a cat"}))["data"]) == 1


async def pairs_are_scored(scene: Scene) -> None:
    for path in ("/score", "/v1/score"):
        assert len((await scene.post(path, PAIR))["data"]) == 2


async def documents_are_ranked(scene: Scene) -> None:
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        assert len((await scene.post(path, DOCUMENTS))["results"]) == 2


async def items_are_scored_by_a_generator(scene: Scene) -> None:
    body = {"model": CHAT_MODEL, "query": "Is it a fruit?", "items": ["apple", "car"], "label_token_ids": [301, 302]}
    assert len((await scene.post("/generative_scoring", body))["data"]) == 2


async def text_is_tokenized(scene: Scene) -> None:
    tokens = await scene.post("/tokenize", {"model": CHAT_MODEL, "prompt": "def read(self):"})
    text = await scene.post("/detokenize", {"model": CHAT_MODEL, "tokens": tokens["tokens"]})
    assert text["prompt"] == "def read(self):"


async def invocation_is_answered(scene: Scene) -> None:
    chatted = await scene.post("/invocations", {"model": CHAT_MODEL, "messages": MESSAGES, **BRIEF})
    assert chatted["object"] == "chat.completion"


# Sound.


async def speech_is_transcribed(scene: Scene) -> None:
    assert (await scene.client.audio.transcriptions.create(model=CHAT_MODEL, file=silence())).text


async def speech_is_translated(scene: Scene) -> None:
    assert (await scene.client.audio.translations.create(model=CHAT_MODEL, file=silence())).text


async def realtime_session(scene: Scene) -> None:
    """Through a gateway of its own, before a peer in this process."""
    async with RealtimeEngine() as engine:
        starting = scene.start_gateway({"backends": [{"url": engine.url}]})
        gateway = await asyncio.to_thread(starting.__enter__)
        try:
            async with gateway.client() as sdk, sdk.realtime.connect(model=engine.model) as session:
                assert (await session.recv()).type == "session.created"
                for event in ({"type": "session.update", "model": engine.model}, {"type": "input_audio_buffer.commit"}):
                    await session.send(cast(Any, event))
                await session.input_audio_buffer.append(audio=base64.b64encode(bytes(320)).decode())
                assert cast(Any, await session.recv()).delta
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)


async def realtime_is_refused(scene: Scene) -> None:
    """No model of the fleet has the realtime API."""
    with pytest.raises(InvalidStatus) as caught:
        async with scene.client.realtime.connect(model=CHAT_MODEL):
            pass
    assert caught.value.response.status_code == 404
    assert json.loads(caught.value.response.body)["error"]["code"] == "endpoint_not_offered"


# Files and batches: by a gateway that keeps them.


@asynccontextmanager
async def keeping(scene: Scene) -> AsyncIterator[tuple[AsyncOpenAI, str]]:
    """The SDK on a gateway with a folder for batches, and the id of a file with one line."""
    body = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    with TemporaryDirectory() as folder, scene.start_gateway({"batches": {"path": folder}}) as gateway:
        async with gateway.client() as sdk:
            file = await sdk.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
            yield sdk, file.id


async def files_are_kept(scene: Scene) -> None:
    async with keeping(scene) as (sdk, file_id):
        assert [file.id async for file in sdk.files.list()] == [file_id]
        assert (await sdk.files.retrieve(file_id)).filename == "lines.jsonl"
        assert b"custom_id" in (await sdk.files.content(file_id)).content
        assert (await sdk.files.delete(file_id)).deleted


async def batch_is_run(scene: Scene) -> None:
    async with keeping(scene) as (sdk, file_id):
        made = await sdk.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
        assert [batch.id async for batch in sdk.batches.list()] == [made.id]
        while (await sdk.batches.retrieve(made.id)).status != "completed":
            await asyncio.sleep(0.1)
        with pytest.raises(ConflictError):
            await sdk.batches.cancel(made.id)


# What the gateway answers itself.


async def models_are_listed(scene: Scene) -> None:
    assert {model.id for model in (await scene.client.models.list()).data} == {CHAT_MODEL, EMBEDDING_MODEL}


async def model_is_retrieved(scene: Scene) -> None:
    assert (await scene.client.models.retrieve(CHAT_MODEL)).id == CHAT_MODEL


async def version_is_told(scene: Scene) -> None:
    assert (await scene.get("/version"))["version"]


async def load_is_told(scene: Scene) -> None:
    assert (await scene.get("/load"))["server_load"] >= 0


async def tokenizer_is_described(scene: Scene) -> None:
    """It has no model, so the fleet has to have one only."""
    with scene.start_gateway({"backends": [{"url": scene.fleet.chat_urls[0]}]}) as gateway:
        async with gateway.client() as sdk:
            found: Any = await sdk.get(f"{gateway.url}/tokenizer_info", cast_to=object)
    assert found["tokenizer_class"]


async def health_is_told(scene: Scene) -> None:
    for path in ("/livez", "/readyz", "/health", "/ping"):
        assert (await scene.get(path))["status"]


async def base64_embedding(scene: Scene) -> None:
    """The SDK's own default is base64, which it decodes."""
    answer = await scene.client.embeddings.create(model=EMBEDDING_MODEL, input="a cat", encoding_format="base64")
    assert base64.b64decode(str(answer.data[0].embedding))


CHATS = "POST /v1/chat/completions"
SDK_CALLS: tuple[Call, ...] = (
    Call("chat.completions.create", CHATS, chat_is_answered),
    Call("chat.completions.create(stream=True)", CHATS, chat_streams),
    Call("chat.completions.stream", CHATS, chat_stream_helper),
    Call("chat.completions.create(tools=...)", CHATS, tool_is_called, "`tool_choice: auto` needs vLLM's"
         " `--enable-auto-tool-choice` and `--tool-call-parser`"),
    Call("chat.completions.create(response_format=...)", CHATS, format_is_kept),
    Call("completions.create", "POST /v1/completions", completion_is_answered, "also as a stream"),
    Call("embeddings.create", "POST /v1/embeddings", embedding_is_made, "small requests are batched"),
    Call("embeddings.create(encoding_format='base64')", "POST /v1/embeddings", base64_embedding),
    Call("responses.create", "POST /v1/responses", response_is_created),
    Call("responses.create(stream=True)", "POST /v1/responses", response_streams),
    Call("responses.create(previous_response_id=...)", "POST /v1/responses", response_is_continued,
         "on the backend that stores the response; needs `VLLM_ENABLE_RESPONSES_API_STORE=1`"),
    Call("responses.retrieve", "GET /v1/responses/{id}", response_is_retrieved, "the same"),
    Call("responses.create(background=True)", "POST /v1/responses", response_runs_in_the_background,
         "it holds its slots on the backend until it is complete"),
    Call("responses.cancel", "POST /v1/responses/{id}/cancel", response_is_cancelled, "of one in the background"),
    Call("responses.retrieve(stream=True, starting_after=...)", "GET /v1/responses/{id}", response_stream_is_resumed,
         "of one in the background that was created as a stream", REAL),
    Call("audio.transcriptions.create", "POST /v1/audio/transcriptions", speech_is_transcribed,
         f"needs {SPEECH_MODEL}", SIMULATED),
    Call("audio.translations.create", "POST /v1/audio/translations", speech_is_translated,
         f"needs {SPEECH_MODEL}", SIMULATED),
    Call("realtime.connect", "GET /v1/realtime", realtime_session, "needs a realtime model, for example Voxtral"
         " Realtime; vLLM's events ([realtime.md](realtime.md))", PEER),
    Call("realtime.connect(model='one without it')", "GET /v1/realtime", realtime_is_refused,
         "refused: 404 `endpoint_not_offered`"),
    Call("files.create", "POST /v1/files", files_are_kept, KEEPS),
    Call("files.list", "GET /v1/files", files_are_kept, KEEPS),
    Call("files.retrieve", "GET /v1/files/{id}", files_are_kept, KEEPS),
    Call("files.content", "GET /v1/files/{id}/content", files_are_kept, KEEPS),
    Call("files.delete", "DELETE /v1/files/{id}", files_are_kept, KEEPS),
    Call("batches.create", "POST /v1/batches", batch_is_run, KEEPS),
    Call("batches.retrieve", "GET /v1/batches/{id}", batch_is_run, KEEPS),
    Call("batches.list", "GET /v1/batches", batch_is_run, KEEPS),
    Call("batches.cancel", "POST /v1/batches/{id}/cancel", batch_is_run, KEEPS),
    Call("models.list", "GET /v1/models", models_are_listed, "the models of all backends, and aliases"),
    Call("models.retrieve", "GET /v1/models/{model}", model_is_retrieved),
)  # fmt: skip
OTHER_CALLS: tuple[Call, ...] = (
    Call("POST /v1/chat/completions/batch", "vLLM", batch_of_chats, "a sequence for each conversation"),
    Call("POST /v1/messages", "Anthropic", message_is_answered, "errors have Anthropic's shape"),
    Call("POST /v1/messages/count_tokens", "Anthropic", message_is_counted),
    Call("POST /v2/embed", "Cohere", cohere_embedding),
    Call("POST /rerank, /v1/rerank, /v2/rerank", "Jina, Cohere", documents_are_ranked),
    Call("POST /score, /v1/score", "vLLM", pairs_are_scored),
    Call("POST /pooling", "vLLM", text_is_pooled),
    Call("POST /classify", "vLLM", text_is_classified, f"needs {CLASSIFIER}", SIMULATED),
    Call("POST /generative_scoring", "vLLM", items_are_scored_by_a_generator, proved_on=REAL),
    Call("POST /tokenize, /detokenize", "vLLM", text_is_tokenized),
    Call("GET /tokenizer_info", "vLLM", tokenizer_is_described, "of a fleet with one model; needs"
         " `--enable-tokenizer-info-endpoint`", REAL),
    Call("POST /invocations", "SageMaker", invocation_is_answered, "the fields of the body decide the endpoint"),
    Call("GET /version", "vLLM", version_is_told, "the versions of all backends"),
    Call("GET /load", "vLLM", load_is_told, "sequences in flight on all backends"),
    Call("GET /livez, /readyz, /health, /ping", "vLLM, Kubernetes", health_is_told, "without an API key"),
)  # fmt: skip
