"""A run of engines and gateway, recorded and replayed: how well the engine model predicts it."""
