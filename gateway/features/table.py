"""The table of all features. A feature is imported only where the configuration uses it."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from typing import Any

from gateway.config import Config
from gateway.feature import Feature


def imported(path: str) -> Any:
    """The object with this name, as `module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True, slots=True)
class FeatureEntry:
    """A row in the table of features.

    `builder`: its constructor from the `Core`, or the place of that; the module is imported only if the feature
    `is_on`. `off_paths`: errors for its paths while it is off.
    """

    name: str
    builder: str | Callable[..., Feature]
    is_on: Callable[[Config], bool]
    _: KW_ONLY
    off_paths: Mapping[bytes, str] = field(default_factory=dict)

    def found(self) -> Callable[..., Feature]:
        """The builder, imported if need be."""
        found: Callable[..., Feature] = imported(self.builder) if isinstance(self.builder, str) else self.builder
        return found


def _always(_: Config) -> bool:
    """Every gateway uses it, or it has pages of the admin port, which no reload can add."""
    return True


# In the order in which they are built: later ones may use earlier ones' additions to the core.
FEATURES = (
    FeatureEntry("exact", "gateway.features.exact.feature:ExactFeature", _always),
    FeatureEntry("responses", "gateway.features.responses.feature:ResponsesFeature", _always),
    FeatureEntry("keys", "gateway.features.keys.feature:KeysFeature", _always),
    FeatureEntry("models", "gateway.features.models.feature:ModelsFeature", _always),
    FeatureEntry("embeddings", "gateway.features.embeddings.feature:EmbeddingsFeature", _always),
    FeatureEntry("uploads", "gateway.features.uploads.feature:UploadsFeature", _always),
    FeatureEntry("realtime", "gateway.features.realtime.feature:RealtimeFeature", _always),
    FeatureEntry("insights", "gateway.features.insights.feature:InsightsFeature", _always),
    FeatureEntry(
        "tracing", "gateway.features.tracing.feature:TracingFeature", lambda config: bool(config.tracing.endpoint)
    ),
    FeatureEntry(
        "discovery", "gateway.features.discovery.feature:DiscoveryFeature", lambda config: config.discovery.is_on
    ),
    FeatureEntry(
        "coordination",
        "gateway.features.coordination.feature:CoordinationFeature",
        lambda config: bool(config.coordination.url),
    ),
    FeatureEntry(
        "batches",
        "gateway.features.batches.feature:BatchesFeature",
        lambda config: config.batches.path is not None,
        off_paths=dict.fromkeys(
            (b"/v1/files", b"/v1/batches"), "files and batches are off; set batches.path in the configuration."
        ),
    ),
)
# The operators' side shows all features, so it is built last.
OPERATORS = "gateway.features.operate.operators:Operators"
