"""Outage tests: how proxies behave while one engine is away."""
