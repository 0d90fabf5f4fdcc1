"""The features: what the core can do without, each in a room of its own."""
