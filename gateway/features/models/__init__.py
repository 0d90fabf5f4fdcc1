"""Models: their names, what may take their place, LoRA adapters, and engines that sleep."""
