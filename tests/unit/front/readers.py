"""Readers of requests with the names of models and the batches of their configuration, as the gateway makes them."""

from typing import Any

from gateway.config import Config
from gateway.core.front.read import RequestReader
from gateway.core.routing.estimates import Estimates
from gateway.features.embeddings.reading import work_readers
from gateway.features.models.aliases import Aliases
from gateway.features.responses.stored import StoredResponses


def request_reader(
    config: Config, estimates: Estimates | None = None, stored: StoredResponses | None = None, **more: Any
) -> RequestReader:
    return RequestReader(
        config,
        estimates=estimates or Estimates(),
        stored=stored or StoredResponses(),
        salt_secret=b"secret",
        names=Aliases.configured(config.models, {}),
        works=work_readers(config),
        **more,
    )
