"""What the gateway does when it is asked for many times what the engines can serve."""
