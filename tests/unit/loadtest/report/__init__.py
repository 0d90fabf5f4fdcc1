"""What a run is told as."""
