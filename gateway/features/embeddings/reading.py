"""Which requests for embeddings, scores and rankings are sent in batches or in pieces, by the configuration."""

from typing import Any, Final

from gateway.config import Config
from gateway.core.front.read import WorkReader
from gateway.features.embeddings.wire import inputs_of, pairs_of

COALESCED: Final = "coalesced"
SPLIT: Final = "split"


def work_readers(config: Config) -> dict[str, WorkReader]:
    """The readers by endpoint. With `coalesce` off, a model's requests are sent unchanged."""
    by_default = config.embeddings.coalesce
    own = {name: config.coalesces(name) for name in config.models.by_name}
    if not (by_default or any(own.values())):
        return {}

    def read(endpoint: str, document: dict[str, Any], model: str) -> tuple[str, object] | None:
        if not own.get(model, by_default):
            return None
        if endpoint == "embeddings":
            inputs = inputs_of(document, model)
            return None if inputs is None else (COALESCED, inputs)
        pairs = pairs_of(endpoint, document, model)
        return None if pairs is None else (SPLIT, pairs)

    return dict.fromkeys(("embeddings", "rerank", "score"), read)
