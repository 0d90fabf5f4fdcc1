"""TLS of the client port and of backends."""
