"""What operators see: metrics and the access log."""
