"""Models: their names, fallbacks, LoRA adapters, and sleeping engines."""
