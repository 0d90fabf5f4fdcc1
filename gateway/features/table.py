"""The table of all features. A feature is imported only where the configuration uses it."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module

from gateway.config import Config
from gateway.core.core import Core
from gateway.feature import Feature


@dataclass(frozen=True, slots=True)
class FeatureEntry:
    """A feature in the table of all. `builder`: the module and the name of what builds it, which is imported only where
    the feature `is_on`. `off_paths`: what clients are told of paths that it would have."""

    name: str
    builder: str | Callable[[Core], Feature]
    is_on: Callable[[Config], bool]
    _: KW_ONLY
    off_paths: Mapping[bytes, str] = field(default_factory=dict)

    def build(self, core: Core) -> Feature:
        builder = self.builder
        if isinstance(builder, str):
            module, _, name = builder.partition(":")
            builder = getattr(import_module(module), name)
        assert callable(builder)
        return builder(core)


def _always(_: Config) -> bool:
    """It is on, or a reload may switch it on."""
    return True


# In the order in which they are built: later ones may use what earlier ones give the core.
FEATURES = (
    FeatureEntry("exact", "gateway.features.exact.feature:ExactFeature", _always),
    FeatureEntry("responses", "gateway.features.responses.feature:ResponsesFeature", _always),
    FeatureEntry("keys", "gateway.features.keys.feature:KeysFeature", _always),
    FeatureEntry("models", "gateway.features.models.feature:ModelsFeature", _always),
    FeatureEntry("embeddings", "gateway.features.embeddings.feature:EmbeddingsFeature", _always),
    FeatureEntry("uploads", "gateway.features.uploads.feature:UploadsFeature", _always),
    FeatureEntry("realtime", "gateway.features.realtime.feature:RealtimeFeature", _always),
    FeatureEntry("insights", "gateway.features.insights.feature:InsightsFeature", _always),
    FeatureEntry("tracing", "gateway.features.tracing.feature:TracingFeature", _always),
    FeatureEntry("discovery", "gateway.features.discovery.feature:DiscoveryFeature", _always),
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
