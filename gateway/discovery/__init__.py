"""Finds backends: a file that changes, or the addresses of a name in DNS."""
