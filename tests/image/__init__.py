"""Builds the container image without a container engine, and checks it."""
