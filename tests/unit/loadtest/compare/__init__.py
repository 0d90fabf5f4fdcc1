"""Tests of comparing proxies."""
