"""A gateway takes over from the one before it: sockets, clients, what was learned, and slots that are still in use."""
