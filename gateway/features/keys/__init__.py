"""API keys: the keys in effect, their limits, and their usage."""
