"""WebSocket sessions: the client's side, the backend's, and the bytes between them."""
