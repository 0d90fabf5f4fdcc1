"""What is known of the fleet."""
