"""What is asked: prompts, reproducible from a seed and an index."""
