"""The real vLLM on the CPU."""
