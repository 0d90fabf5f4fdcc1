"""The table of all features. A feature is imported only where the configuration uses it."""

from gateway.config import Config
from gateway.feature import FeatureEntry


def _always(_: Config) -> bool:
    """It is on, or a reload may switch it on."""
    return True


# In the order in which they are built: later ones may use what earlier ones give the core.
FEATURES = (
    FeatureEntry("exact", "gateway.exact.feature:ExactFeature", _always),
    FeatureEntry("responses", "gateway.responses.feature:ResponsesFeature", _always),
    FeatureEntry("keys", "gateway.keys.feature:KeysFeature", _always),
    FeatureEntry("models", "gateway.models.feature:ModelsFeature", _always),
    FeatureEntry("embeddings", "gateway.embeddings.feature:EmbeddingsFeature", _always),
    FeatureEntry("uploads", "gateway.uploads.feature:UploadsFeature", _always),
    FeatureEntry("realtime", "gateway.realtime.feature:RealtimeFeature", _always),
    FeatureEntry("insights", "gateway.insights.feature:InsightsFeature", _always),
    FeatureEntry("tracing", "gateway.tracing.feature:TracingFeature", _always),
    FeatureEntry("discovery", "gateway.discovery.feature:DiscoveryFeature", _always),
    FeatureEntry(
        "coordination",
        "gateway.coordination.feature:CoordinationFeature",
        lambda config: bool(config.coordination.url),
    ),
    FeatureEntry(
        "batches",
        "gateway.batches.feature:BatchesFeature",
        lambda config: config.batches.path is not None,
        off_paths=dict.fromkeys(
            (b"/v1/files", b"/v1/batches"), "files and batches are off; set batches.path in the configuration."
        ),
    ),
)
