"""Processes that a command owns."""
