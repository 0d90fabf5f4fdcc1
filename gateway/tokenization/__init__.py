"""Exact token ids of prompts: rendered and encoded beside the event loop, as the backends are seen to do it."""
