"""The core: how a request gets its engine, and how its answer comes back. It imports no feature."""
