"""The fields of a request that determine its prompt's text, interpreted as vLLM's OpenAI front end does.

A request with a field whose effect is not known is refused here, and is then routed by its bytes. vLLM has two forms of
a turn's content; which one it passes to a template depends on the template.
"""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class Feature(StrEnum):
    """A way in which prompts are made; each is compared with the backend separately."""

    COMPLETION = "completion"
    CHAT = "chat"
    PARTS = "parts"  # a turn's content in several parts
    TOOLS = "tools"
    REASONING = "reasoning"
    CONTINUED = "continued"  # the last turn is to be continued


class ContentFormat(StrEnum):
    """How a template gets a turn's content."""

    STRING = "string"
    PARTS = "openai"


class NotUnderstood(Exception):
    """The request's prompt cannot be determined with certainty; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A request, read: a text, or a conversation for the template."""

    features: frozenset[Feature]
    add_special_tokens: bool
    text: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


# The fields that are read here. Others, as far as is known, change nothing in a prompt.
DECISIVE: Final = (
    "messages", "prompt", "suffix", "tools", "tool_choice", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "documents", "reasoning_effort", "chat_template", "chat_template_kwargs",
    "truncate_prompt_tokens", "prompt_embeds", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
_FORBIDDEN: Final = (
    "suffix", "chat_template", "truncate_prompt_tokens", "prompt_embeds", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
# Arguments of the template's caller, which a client's variables must not name.
_RESERVED: Final = frozenset((
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
))  # fmt: skip
_EMPTY_FIELDS: Final = frozenset(("refusal", "audio", "function_call", "annotations"))  # clients echo them, as null
_FIELDS: Final = {
    "system": frozenset(("role", "content", "name")),
    "user": frozenset(("role", "content", "name")),
    "assistant": frozenset(("role", "content", "name", "tool_calls", "reasoning", "reasoning_content")) | _EMPTY_FIELDS,
    "tool": frozenset(("role", "content", "name", "tool_call_id")),
}
_DROPPED_SYSTEM_TEXT: Final = "x-anthropic-billing-header"  # some versions of vLLM drop such a line


def decisive(document: dict[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in DECISIVE if name in document}


def read(endpoint: str, document: dict[str, Any], content_format: str) -> Reading:
    """A request of `chat` or `completions`. Raises NotUnderstood."""
    for name in _FORBIDDEN:
        _require(document.get(name) is None, f"it has {name}")
    match endpoint:
        case "completions":
            return _completion(document)
        case "chat":
            return _chat(document, content_format)
    raise NotUnderstood(f"the gateway does not render the endpoint {endpoint}")


def _completion(document: dict[str, Any]) -> Reading:
    prompt = document.get("prompt")
    if type(prompt) is list and len(prompt) == 1:
        prompt = prompt[0]
    if type(prompt) is not str:
        raise NotUnderstood("the prompt is not one text")
    return Reading(frozenset((Feature.COMPLETION,)), _flag(document, "add_special_tokens", True), text=prompt)


def _chat(document: dict[str, Any], content_format: str) -> Reading:
    turns = document.get("messages")
    if type(turns) is not list or not turns:
        raise NotUnderstood("there are no messages")
    features = {Feature.CHAT}
    messages = [_message(turn, content_format, features) for turn in turns]
    tools = _tools(document)
    if tools is not None:
        features.add(Feature.TOOLS)
    variables = _variables(document)
    if variables["continue_final_message"] or not variables["add_generation_prompt"]:
        features.add(Feature.CONTINUED)
    special = _flag(document, "add_special_tokens", False)
    return Reading(frozenset(features), special, messages=messages, tools=tools, variables=variables)


def _message(turn: Any, content_format: str, features: set[Feature]) -> dict[str, Any]:
    role = turn.get("role") if type(turn) is dict else None
    known = _FIELDS.get(role) if type(role) is str else None
    if known is None or type(role) is not str:
        raise NotUnderstood(f"the role {role!r}")
    _require(turn.keys() <= known, f"a turn of the role {role} with other fields")
    _require(not any(turn.get(name) for name in _EMPTY_FIELDS), "a refusal, sound or function call in a turn")
    texts = _texts(turn, role, features)
    as_parts = content_format == ContentFormat.PARTS
    message: dict[str, Any] = {"role": role}
    if as_parts and role != "tool":
        message["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        message["content"] = "\n".join(texts if as_parts else filter(None, texts))
    if role == "assistant":
        if calls := turn.get("tool_calls"):
            message["tool_calls"] = _calls(calls)
            features.add(Feature.TOOLS)
        _add_reasoning(turn, message, features)
    elif role == "tool":
        features.add(Feature.TOOLS)
        if "tool_call_id" in turn:
            _require(type(turn["tool_call_id"]) is str, "a tool_call_id that is no text")
            message["tool_call_id"] = turn["tool_call_id"]
    if "name" in turn:
        _require(type(turn["name"]) is str, "a name that is no text")
        message["name"] = turn["name"]
    return message


def _texts(turn: dict[str, Any], role: str, features: set[Feature]) -> list[str]:
    content = turn.get("content")
    if content is None and role == "assistant":
        return []
    if type(content) is str:
        texts = [content]
    elif type(content) is list:
        texts = [_text_of(part) for part in content]
        if len(texts) != 1:
            features.add(Feature.PARTS)
    else:
        raise NotUnderstood("a turn's content is neither text nor parts")
    if role == "system":
        _require(not any(text.startswith(_DROPPED_SYSTEM_TEXT) for text in texts), "a billing header")
    return texts


def _text_of(part: Any) -> str:
    if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
        raise NotUnderstood("a part of a turn's content that is not plain text")
    _require(part.keys() <= {"type", "text", "cache_control"}, "a text with other fields")
    text: str = part["text"]
    return text


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls as templates get them: arguments parsed, fields in the order that vLLM gives them."""
    _require(type(calls) is list, "tool_calls that are no list")
    made = []
    for call in calls:
        function = call.get("function") if type(call) is dict else None
        if type(function) is not dict or call.keys() != {"id", "type", "function"} or call["type"] != "function":
            raise NotUnderstood("a tool call with other fields")
        name, arguments = function.get("name"), function.get("arguments")
        _require(function.keys() == {"name", "arguments"} and type(call["id"]) is str, "a tool call with other fields")
        if type(name) is not str or type(arguments) is not str:
            raise NotUnderstood("a tool call whose name or arguments are no text")
        inner = {"arguments": _parsed(arguments), "name": name}
        made.append({"id": call["id"], "function": inner, "type": "function"})
    return made


def _parsed(arguments: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments) if arguments else {}
    except ValueError:
        return {}
    return parsed if type(parsed) is dict else {}


def _add_reasoning(turn: dict[str, Any], message: dict[str, Any], features: set[Feature]) -> None:
    reasoning = turn.get("reasoning")
    if reasoning is None:
        reasoning = turn.get("reasoning_content")
    if reasoning is not None:
        _require(type(reasoning) is str, "reasoning that is no text")
        message["reasoning"] = message["reasoning_content"] = reasoning
        features.add(Feature.REASONING)


def _tools(document: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = document.get("tools")
    if tools is None:
        return None
    if type(tools) is not list or not tools:
        raise NotUnderstood("tools that are no list, or an empty one")
    _require(document.get("tool_choice") != "none", "tools that are not to be used")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if type(tool) is dict else None
    if type(function) is not dict or tool.keys() != {"type", "function"} or tool["type"] != "function":
        raise NotUnderstood("a tool with other fields")
    _require(function.keys() <= {"name", "description", "parameters", "strict"}, "a function with other fields")
    _require(type(function.get("name")) is str, "a function without a name")
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        made["strict"] = function["strict"]
    return {"type": "function", "function": made}


def _variables(document: dict[str, Any]) -> dict[str, Any]:
    """What the template is given besides the conversation and the tools."""
    given = document.get("chat_template_kwargs")
    if given is None:
        given = {}
    if type(given) is not dict:
        raise NotUnderstood("chat_template_kwargs that are no object")
    _require(_RESERVED.isdisjoint(given), "a variable that is not the client's to set")
    variables = {name: value for name, value in given.items() if value is not None and value != "auto"}
    for name in ("documents", "reasoning_effort"):
        if document.get(name) is not None:
            variables[name] = document[name]
    if document.get("reasoning_effort") is not None and "enable_thinking" not in given:
        variables["enable_thinking"] = document["reasoning_effort"] != "none"
    variables["add_generation_prompt"] = _flag(document, "add_generation_prompt", True)
    variables["continue_final_message"] = _flag(document, "continue_final_message", False)
    return variables


def _flag(document: dict[str, Any], name: str, default: bool) -> bool:
    value = document.get(name, default)
    if type(value) is not bool:
        raise NotUnderstood(f"{name} is neither true nor false")
    return value


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotUnderstood(otherwise)
