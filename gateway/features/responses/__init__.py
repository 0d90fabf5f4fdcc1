"""Responses that backends store or continue in the background."""
