"""Observability: metrics and the access log."""
