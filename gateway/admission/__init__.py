"""May a request enter, when, and which backend is bound to it."""
