"""Bytes to and from a backend."""
