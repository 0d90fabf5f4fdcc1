"""Tests of the gateway and of its load-testing tools."""
