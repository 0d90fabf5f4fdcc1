"""The HTTP surface: one module a family of endpoints, each handler a coroutine of (service, request)."""
