"""`loadtest predict`: how well the engine model predicts what a gateway's access log has."""
