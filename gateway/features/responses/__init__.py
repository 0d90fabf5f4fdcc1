"""Responses that backends store, and those that go on in the background."""
