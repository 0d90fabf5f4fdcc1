"""What a run is reported as."""
