"""What batching does, computed on the simulated engine in virtual time and drawn on one page."""
