"""What real engines answer, recorded, and whether the simulated engine answers alike."""
