"""A million mixed requests, and nothing is left of them."""
