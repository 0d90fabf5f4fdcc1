"""What is known of the models' tokenizers and of the backends that were compared with them."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gateway.tokenization.conversation import ContentFormat, Feature


class TokenizerVerdict(NamedTuple):
    """Whether a backend makes a model's tokens as they are made here.

    `counts`: it counts the tokens of texts that it embeds as they are counted here.
    """

    state: Literal["pending", "verified", "refused"] = "pending"
    reason: str = ""
    features: frozenset[Feature] = frozenset()
    counts: bool = False


@dataclass
class Counters:
    """What became of the prompts whose tokens were wanted; seconds and segments are sums."""

    encoded: int = 0
    unknown: int = 0  # holds something that is not known to be rendered alike
    late: int = 0
    busy: int = 0
    too_long: int = 0
    failed: int = 0
    segments: int = 0
    cached_segments: int = 0
    encode_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass
class ModelState:
    """One model's tokenizer, and which backends make the same tokens."""

    name: str
    source: str
    encoding: str = ""  # how its texts are encoded; empty = not loaded
    failure: str = ""
    content_format: ContentFormat = ContentFormat.STRING
    verdicts: dict[str, TokenizerVerdict] = field(default_factory=dict)
    features: frozenset[Feature] = frozenset()  # what every verified backend does alike

    def verdict(self, backend: str) -> TokenizerVerdict:
        """What is known of a backend."""
        return self.verdicts.get(backend, TokenizerVerdict())

    def judged(self, backend: str, verdict: TokenizerVerdict) -> None:
        """Remember what was seen of a backend."""
        self.verdicts[backend] = verdict
        verified = [each.features for each in self.verdicts.values() if each.state == "verified"]
        self.features = frozenset.intersection(*verified) if verified else frozenset()

    def unload(self) -> None:
        """The process that had the tokenizer has ended; what the next one makes of it is to be compared again."""
        self.encoding, self.verdicts, self.features = "", {}, frozenset()

    def told(self) -> dict[str, Any]:
        """For the admin port."""
        return {
            "model": self.name,
            "tokenizer": self.source,
            "encoding": self.encoding or "not loaded",
            "failure": self.failure,
            "content_format": self.content_format.value,
            "features": sorted(each.value for each in self.features),
            "backends": {
                name: {
                    "state": verdict.state,
                    "reason": verdict.reason,
                    "features": sorted(each.value for each in verdict.features),
                    "embeddings": verdict.counts,
                }
                for name, verdict in self.verdicts.items()
            },
        }
