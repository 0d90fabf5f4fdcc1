"""Exact mode: what engines' caches hold, by their own KV events, and prompts as the tokens that their blocks are of."""
