"""The gateway as users run it, in front of simulated or real engines."""
