"""The inputs of requests for embeddings, scores and rankings, to send them in batches or in pieces."""

from dataclasses import KW_ONLY, dataclass
from typing import Any


@dataclass(slots=True, init=False)
class EmbeddingInputs:
    """The inputs of an embeddings request, if they may be batched with other requests.

    `items` are texts, or lists of token ids. `template` is the rest of the body, up to where the inputs follow:
    requests may share a batch only if theirs are equal; the cache salt in it keeps an API key's inputs apart.
    """

    items: list[str] | list[list[int]]
    are_ids: bool
    sizes_bytes: list[int]
    template: bytes
    wants_floats: bool

    def __init__(
        self,
        items: list[str] | list[list[int]],
        are_ids: bool,
        sizes_bytes: list[int],
        template: bytes,
        wants_floats: bool,
    ) -> None:
        self.items = items
        self.are_ids = are_ids
        self.sizes_bytes = sizes_bytes
        self.template = template
        self.wants_floats = wants_floats


@dataclass(slots=True)
class Pairs:
    """The query and documents of a rerank or score request, where each document can be scored on its own.

    All `documents` are scored against the one query, or each against the query in its place. `names`: of the two
    fields; `fields`: the rest of the body. `sizes_bytes` is of a document and its query together.
    """

    names: tuple[str, str]
    queries: str | list[str]
    _: KW_ONLY
    documents: list[str]
    sizes_bytes: list[int]
    fields: dict[str, Any]
    ranks: bool  # most relevant first, and of these `top_n`; 0 = all
    top_n: int = 0

    @property
    def share_query(self) -> bool:
        """Whether there is one query for all."""
        return type(self.queries) is str or len(self.queries) == 1
