"""What goes wrong, on purpose."""
