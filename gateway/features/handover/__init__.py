"""A gateway takes over from its predecessor: sockets, clients, learned state, and slots in use."""
