"""Speaks HTTP and OpenAI to clients."""
