"""Unit tests of the benchmark."""
