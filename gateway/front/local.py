"""What the gateway answers itself: which models there are, and whether it lives and is ready."""

from collections.abc import Mapping
from urllib.parse import unquote

import orjson

from gateway.backends.registry import Fleet
from gateway.errors import Draining, ModelNotFound, NoBackend
from gateway.front.reply import JSON, Reply
from gateway.front.routes import Local, Route

_MODEL_PATH = "/v1/models/"


def answer_local(
    route: Route, path: bytes, fleet: Fleet, aliases: Mapping[str, str], draining: bool, reply: Reply
) -> None:
    """Answer through `reply`. Raises ModelNotFound, NoBackend or Draining."""
    if route.local is Local.LIVE:
        reply.send(200, JSON, b"", b'{"status":"alive"}')
    elif route.local is Local.READY:
        if draining:
            raise Draining("The gateway is shutting down.")
        if not fleet.ready:
            raise NoBackend("No backend is available.")
        reply.send(200, JSON, b"", b'{"status":"ready"}')
    elif route.local is Local.MODELS:
        reply.send(200, JSON, b"", orjson.dumps({"object": "list", "data": _cards(fleet, aliases)}))
    else:
        name = unquote(path.partition(b"?")[0].decode("ascii")).removeprefix(_MODEL_PATH)
        found = next((card for card in _cards(fleet, aliases) if card["id"] == name), None)
        if found is None:
            raise ModelNotFound(
                f"The model {name!r} does not exist. GET /v1/models lists the available models.", param="model"
            )
        reply.send(200, JSON, b"", orjson.dumps(found))


def _cards(fleet: Fleet, aliases: Mapping[str, str]) -> list[dict[str, object]]:
    """The backends' model cards as they gave them, and one for each alias of a model that is there."""
    cards = {
        card.id: {"object": "model", "owned_by": "vllm"} | dict(card.raw) | {"id": card.id} for card in fleet.models()
    }
    named = [cards[model] | {"id": alias} for alias, model in aliases.items() if model in cards and alias not in cards]
    return [*cards.values(), *named]
