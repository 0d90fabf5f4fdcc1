"""Side-by-side cost of proxies on one core."""
