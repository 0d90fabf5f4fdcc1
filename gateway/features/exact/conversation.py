"""The fields of a request that determine its prompt's text, interpreted as vLLM's OpenAI front end does.

A request with a field of unknown effect is refused here, and is then routed by its bytes: the classes of turns, parts,
tool calls and tools list all fields that they may have. vLLM has two forms of a turn's content; which one it passes to
a template depends on the template. The probes at the end show where two tokenizers or templates differ.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType


class PromptFeature(StrEnum):
    """A way in which prompts are made; each is compared with the backend separately."""

    COMPLETION = "completion"
    CHAT = "chat"
    PARTS = "parts"  # a turn's content in several parts
    TOOLS = "tools"
    REASONING = "reasoning"
    CONTINUED = "continued"  # the last turn will be continued


class ContentFormat(StrEnum):
    """How a template gets a turn's content."""

    STRING = "string"
    PARTS = "openai"


class NotUnderstood(Exception):
    """The request's prompt cannot be determined with certainty; the message gives the reason."""


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    cache_control: Any = None


class _User(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | list[_Part]
    name: str | UnsetType = UNSET


class _System(_User, tag="system"):
    pass


class _ToolResult(_User, tag="tool"):
    tool_call_id: str | UnsetType = UNSET


class _CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _Assistant(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    content: str | list[_Part] | None = None
    name: str | UnsetType = UNSET
    tool_calls: list[_Call] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: Any = None  # clients echo this and the following ones, as null
    audio: Any = None
    function_call: Any = None
    annotations: Any = None


class _ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: Any = None
    parameters: Any = None
    strict: Any = None


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _ToolFunction


class _Completion(msgspec.Struct):
    prompt: str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)]
    add_special_tokens: bool = True


class _Chat(msgspec.Struct):
    messages: Annotated[list[_User | _System | _Assistant | _ToolResult], msgspec.Meta(min_length=1)]
    tools: Annotated[list[_Tool], msgspec.Meta(min_length=1)] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


_FORBIDDEN: Final = "suffix chat_template truncate_prompt_tokens prompt_embeds mm_processor_kwargs media_io_kwargs"
# The fields that are read here. No other field is known to change a prompt.
DECISIVE: Final = frozenset(_FORBIDDEN.split()).union(_Completion.__struct_fields__, _Chat.__struct_fields__)
# Arguments of the template's caller, which a client's variables must not name.
_RESERVED: Final = (
    "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize padding"
    " truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs"
    " sanitize_control_tokens"
)
_DROPPED_SYSTEM_TEXT: Final = "x-anthropic-billing-header"  # some versions of vLLM drop such a line


class Reading(msgspec.Struct, frozen=True):
    """A request, read: a text, or a conversation for the template."""

    features: frozenset[PromptFeature]
    add_special_tokens: bool
    text: str | None = None
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}


def decisive(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name in DECISIVE}


def read(endpoint: str, document: dict[str, Any], content_format: str) -> Reading:
    """A request of `chat` or `completions`. Raises NotUnderstood."""
    for name in _FORBIDDEN.split():
        if document.get(name) is not None:
            raise NotUnderstood(f"it has {name}")
    try:
        if endpoint == "completions":
            request = msgspec.convert(document, _Completion)
            text = request.prompt if isinstance(request.prompt, str) else request.prompt[0]
            return Reading(frozenset((PromptFeature.COMPLETION,)), request.add_special_tokens, text=text)
        if endpoint == "chat":
            return _chat(msgspec.convert(document, _Chat), content_format)
    except msgspec.ValidationError as error:
        raise NotUnderstood(str(error)) from error
    raise NotUnderstood(f"the gateway does not render the endpoint {endpoint}")


def _chat(request: _Chat, content_format: str) -> Reading:
    features = {PromptFeature.CHAT}
    messages = [_message(turn, content_format, features) for turn in request.messages]
    if request.tools is not None:
        features.add(PromptFeature.TOOLS)
        if request.tool_choice == "none":
            raise NotUnderstood("tools that are not to be used")
    if request.continue_final_message or not request.add_generation_prompt:
        features.add(PromptFeature.CONTINUED)
    tools = None if request.tools is None else [_tool(tool.function) for tool in request.tools]
    variables, special = _variables(request), request.add_special_tokens
    return Reading(frozenset(features), special, messages=messages, tools=tools, variables=variables)


def _message(turn: _User | _Assistant, content_format: str, features: set[PromptFeature]) -> dict[str, Any]:
    role = str(turn.__struct_config__.tag)
    texts = [turn.content] if isinstance(turn.content, str) else [part.text for part in turn.content or ()]
    if isinstance(turn.content, list) and len(texts) != 1:
        features.add(PromptFeature.PARTS)
    as_parts = content_format == ContentFormat.PARTS
    message: dict[str, Any] = {"role": role}
    if as_parts and role != "tool":
        message["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        message["content"] = "\n".join(texts if as_parts else filter(None, texts))
    match turn:
        case _System() if any(text.startswith(_DROPPED_SYSTEM_TEXT) for text in texts):
            raise NotUnderstood("a billing header")
        case _Assistant():
            message |= _of_assistant(turn, features)
        case _ToolResult():
            features.add(PromptFeature.TOOLS)
            if turn.tool_call_id is not UNSET:
                message["tool_call_id"] = turn.tool_call_id
    if turn.name is not UNSET:
        message["name"] = turn.name
    return message


def _of_assistant(turn: _Assistant, features: set[PromptFeature]) -> dict[str, Any]:
    if turn.refusal or turn.audio or turn.function_call or turn.annotations:
        raise NotUnderstood("a refusal, sound or function call in a turn")
    fields: dict[str, Any] = {}
    if turn.tool_calls:
        fields["tool_calls"] = [_call(call) for call in turn.tool_calls]
        features.add(PromptFeature.TOOLS)
    reasoning = turn.reasoning_content if turn.reasoning is None else turn.reasoning
    if reasoning is not None:
        fields["reasoning"] = fields["reasoning_content"] = reasoning
        features.add(PromptFeature.REASONING)
    return fields


def _call(call: _Call) -> dict[str, Any]:
    """A tool call as templates get it: arguments parsed, fields in the order that vLLM gives them."""
    arguments = None
    with suppress(ValueError):
        arguments = json.loads(call.function.arguments)
    function = {"arguments": arguments if isinstance(arguments, dict) else {}, "name": call.function.name}
    return {"id": call.id, "function": function, "type": "function"}


def _tool(function: _ToolFunction) -> dict[str, Any]:
    made = msgspec.structs.asdict(function)
    if function.strict is None:
        del made["strict"]
    return {"type": "function", "function": made}


def _variables(request: _Chat) -> dict[str, Any]:
    """Inputs of the template besides the conversation and the tools."""
    given = request.chat_template_kwargs or {}
    if not given.keys().isdisjoint(_RESERVED.split()):
        raise NotUnderstood("a variable that is not the client's to set")
    variables = {name: value for name, value in given.items() if value is not None and value != "auto"}
    if request.documents is not None:
        variables["documents"] = request.documents
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        if "enable_thinking" not in given:
            variables["enable_thinking"] = request.reasoning_effort != "none"
    variables["add_generation_prompt"] = request.add_generation_prompt
    variables["continue_final_message"] = request.continue_final_message
    return variables


_TEXT: Final = (
    "Příliš žluťoučký kůň, 3.14159 = 10²³;  two  spaces\t日本語 e\u0301 🧑\u200d🚀\n"
    "\n\tdef f(x):\n        return x ** 2\n"
)
_PROPERTIES: Final = {"place": {"type": "string"}, "days": {"type": "integer", "default": 1}}
_PARAMETERS: Final = {"type": "object", "properties": _PROPERTIES, "required": ["place"]}
_DESCRIPTION: Final = "Today's weather \u2013 <b>briefly</b>."
_WEATHER: Final = {"name": "get_weather", "description": _DESCRIPTION, "parameters": _PARAMETERS}
_TOOLS: Final = [{"type": "function", "function": function} for function in (_WEATHER, {"name": "get_time"})]
_FUNCTION: Final = {"name": "get_weather", "arguments": '{"place": "Plze\u0148", "days": 2}'}
_CALLS: Final = [{"id": "call00001", "type": "function", "function": _FUNCTION}]
_CALLING: Final = {"role": "assistant", "content": None, "tool_calls": _CALLS}
_RESULT: Final = {"role": "tool", "tool_call_id": "call00001", "content": '{"sky": "blue"}'}
_SYSTEM: Final = {"role": "system", "content": "You are brief. Ž\n"}
_QUESTION: Final = {"role": "user", "content": _TEXT}
_ANSWER: Final = {"role": "assistant", "content": " It squares:\n\n```\n4\n```"}
_THOUGHT: Final = {"role": "assistant", "content": "Four.", "reasoning": "Two squared\nis four."}
_PARTS: Final = [{"type": "text", "text": "First part."}, {"type": "text", "text": " And a second one."}]

# Texts that show whether a backend changes texts before it tokenizes them for an embedding. /tokenize does not show
# that: for some models, vLLM changes texts to lower case.
EMBEDDED: Final = (
    _TEXT,
    "STRASSE, Straße, İstanbul, ÀÉÎ: MIXED Case",
    "Neither [CLS] nor [SEP] nor <s> nor </s> nor <|endoftext|>",
    "a",
)


class Probe(NamedTuple):
    """A request, as clients send it and /tokenize accepts it, and the feature that it tests."""

    feature: PromptFeature
    document: Mapping[str, Any]

    @property
    def endpoint(self) -> str:
        return "completions" if self.feature is PromptFeature.COMPLETION else "chat"


def _asking(*messages: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "add_generation_prompt": True} | more


PROBES: Final = (
    Probe(PromptFeature.COMPLETION, {"prompt": _TEXT}),
    Probe(PromptFeature.COMPLETION, {"prompt": _TEXT * 2, "add_special_tokens": False}),
    Probe(PromptFeature.CHAT, _asking(_QUESTION)),
    Probe(PromptFeature.CHAT, _asking(_QUESTION, _ANSWER, {"role": "user", "content": "\tThanks. "})),
    Probe(PromptFeature.CHAT, _asking(_SYSTEM, _QUESTION)),
    Probe(PromptFeature.PARTS, _asking({"role": "user", "content": _PARTS})),
    Probe(PromptFeature.TOOLS, _asking(_QUESTION, tools=_TOOLS)),
    Probe(PromptFeature.TOOLS, _asking(_QUESTION, _CALLING, _RESULT, tools=_TOOLS)),
    Probe(PromptFeature.REASONING, _asking(_QUESTION, _THOUGHT, {"role": "user", "content": "And cubed?"})),
    Probe(
        PromptFeature.CONTINUED, _asking(_QUESTION, _ANSWER, add_generation_prompt=False, continue_final_message=True)
    ),
)
