"""What the gateway answers itself: which models there are, and whether it lives and is ready."""

from urllib.parse import unquote

import orjson

from gateway.backends.backend import ModelCard
from gateway.backends.registry import Fleet
from gateway.errors import Draining, ModelNotFound, NoBackend
from gateway.front.reply import JSON, Reply
from gateway.front.routes import Local, Route

_MODEL_PATH = "/v1/models/"


def answer_local(route: Route, path: bytes, fleet: Fleet, draining: bool, reply: Reply) -> None:
    """Answer through `reply`. Raises ModelNotFound, NoBackend or Draining."""
    if route.local is Local.LIVE:
        reply.send(200, JSON, b"", b'{"status":"alive"}')
    elif route.local is Local.READY:
        if draining:
            raise Draining("The gateway is shutting down.")
        if not fleet.ready:
            raise NoBackend("No backend can serve requests now.")
        reply.send(200, JSON, b"", b'{"status":"ready"}')
    elif route.local is Local.MODELS:
        cards = [_card(card) for card in fleet.models()]
        reply.send(200, JSON, b"", orjson.dumps({"object": "list", "data": cards}))
    else:
        name = unquote(path.partition(b"?")[0].decode("ascii")).removeprefix(_MODEL_PATH)
        found = next((card for card in fleet.models() if card.id == name), None)
        if found is None:
            raise ModelNotFound(f"The model {name!r} does not exist here.", param="model")
        reply.send(200, JSON, b"", orjson.dumps(_card(found)))


def _card(card: ModelCard) -> dict[str, object]:
    return {"object": "model", "owned_by": "vllm"} | dict(card.raw) | {"id": card.id}
