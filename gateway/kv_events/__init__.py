"""What engines say of their KV caches, as they say it: from the wire to the routing index."""
