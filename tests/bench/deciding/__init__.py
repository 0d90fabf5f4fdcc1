"""What one placement decision costs: the gateway's own code, alone, under realistic loads."""
