"""Hostile inputs against a running gateway: for how long other clients get no answer, and what memory it costs."""
