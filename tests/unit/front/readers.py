"""Readers of requests with the names of models and the batches of their configuration, as the gateway makes them."""

from typing import Any

from gateway.config import Config
from gateway.embeddings.reading import work_readers
from gateway.front.read import RequestReader
from gateway.models.aliases import Aliases
from gateway.responses.stored import StoredResponses
from gateway.routing.estimates import Estimates


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
