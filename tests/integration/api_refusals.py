"""Every part of the OpenAI SDK that the gateway refuses, with the error and the reason. docs/api.md shows it."""

import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from tests.integration.api_calls import SDK_CALLS


@dataclass(frozen=True)
class Refusal:
    """A part of the SDK: all of its methods but those in SDK_CALLS get this error. `names`: prefixes of methods."""

    names: tuple[str, ...]
    why: str
    status: int = 404
    code: str = "unknown_url"


STORES_NOTHING = "neither the gateway nor vLLM stores any"
NO_MODEL = "vLLM has no such endpoint"
HOSTED = "a service of OpenAI's platform"
REFUSALS: tuple[Refusal, ...] = (
    Refusal(("chat.completions.list",), "neither the gateway nor vLLM stores chats", 405, "method_not_allowed"),
    Refusal(
        tuple(f"chat.completions.{name}" for name in ("retrieve", "update", "delete", "messages.list")),
        "neither the gateway nor vLLM stores chats",
    ),
    Refusal(("responses.delete", "responses.input_items.list"), "vLLM offers neither for the responses it stores"),
    Refusal(("responses.compact", "responses.input_tokens.count"), f"{NO_MODEL}; `/tokenize` counts tokens"),
    Refusal(("models.delete",), "backends decide what they serve"),
    Refusal(("audio.speech", "audio.voices", "audio.voice_consents"), NO_MODEL),
    Refusal(("images", "videos"), NO_MODEL),
    Refusal(("moderations", "decisions", "content_provenance_checks"), f"{NO_MODEL} that clients may reach"),
    Refusal(("uploads",), STORES_NOTHING),
    Refusal(("fine_tuning", "evals"), "backends serve models, they do not train them"),
    Refusal(("vector_stores", "containers", "skills"), STORES_NOTHING),
    Refusal(("conversations",), "`previous_response_id` continues a response"),
    Refusal(("beta.assistants", "beta.threads", "beta.chatkit", "beta.agents"), HOSTED),
    Refusal(("realtime.client_secrets", "realtime.calls", "realtime.translations.client_secrets"), HOSTED),
    Refusal(("beta.realtime.sessions", "beta.realtime.transcription_sessions", "live.create", "live.sessions"), HOSTED),
    Refusal(("webhooks", "safety", "admin"), HOSTED),
)

Method = Callable[..., Any]
_FILES = ("audio_file", "file", "image", "recording", "video", "data", "sample")
# Of these a plausible call has arguments that no rule can make up, or it never leaves the client.
UNCALLED = frozenset(
    (
        "admin.organization.external_keys.create",
        "admin.organization.external_keys.validate",
        "audio.voices.create",
        "beta.agents.automations.create",
        "beta.agents.environments.files.create",
        "beta.agents.environments.files.prepare",
        "beta.agents.environments.files.prepare_directory",
        "beta.agents.environments.files.upload",
        "beta.agents.sessions.artifacts.for_result",
        "uploads.upload_file_chunked",
        "vector_stores.file_batches.upload_and_poll",
        "webhooks.unwrap",
        "webhooks.verify_signature",
    )
)


def methods_of(client: AsyncOpenAI) -> dict[str, Method]:
    """Every method of the SDK's resources that sends a request, by its name."""
    resources = {name: getattr(client, name) for name in dir(type(client)) if not name.startswith(("_", "with_"))}
    found: dict[str, Method] = {}
    for name, resource in resources.items():
        if _is_resource(resource):
            found.update(_methods_below(name, resource))
    return found


def _methods_below(prefix: str, resource: object) -> Iterator[tuple[str, Method]]:
    for name in dir(type(resource)):
        if name.startswith(("_", "with_")):
            continue
        member = getattr(resource, name)
        if _is_resource(member):
            yield from _methods_below(f"{prefix}.{name}", member)
        elif callable(member):
            yield f"{prefix}.{name}", member


def _is_resource(value: object) -> bool:
    return type(value).__module__.startswith("openai.resources")


def refused_methods(client: AsyncOpenAI, refusal: Refusal) -> dict[str, Method]:
    """The methods of one part of the SDK which are called to see that they are refused."""
    works = {call.name.partition("(")[0] for call in SDK_CALLS}
    return {
        name: method
        for name, method in methods_of(client).items()
        if any(name == each or name.startswith(f"{each}.") for each in refusal.names)
        and name not in UNCALLED
        and name not in works
    }


async def call(method: Method) -> object:
    """Call it with made-up values of the arguments that it needs."""
    needed = [
        name
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    made: Awaitable[object] | AbstractAsyncContextManager[object]
    made = method(**{name: b"x" if name in _FILES else "x" for name in needed})
    if inspect.isawaitable(made):
        return await made
    async with made as opened:
        return opened
