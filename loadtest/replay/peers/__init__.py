"""The rules of other routers, as baselines: each sends a request on arrival, and it waits inside the engine."""
