"""The known state of the fleet."""
