"""What routing is worth: the same trace through several routers, on engines with prefix caches."""
