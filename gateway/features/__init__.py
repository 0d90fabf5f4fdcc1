"""The features: optional parts, each in its own package."""
