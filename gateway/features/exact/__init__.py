"""Exact mode: engines' cached blocks, from their own KV events, and prompts as the tokens of these blocks."""
