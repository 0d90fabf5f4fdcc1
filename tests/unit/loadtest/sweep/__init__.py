"""Sweeps of vLLM's settings."""
