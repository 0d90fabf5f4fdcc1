"""How it is asked: arrivals, the client, worker processes."""
