"""Restarts of the gateway under load, one after the other."""
