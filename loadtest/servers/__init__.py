"""The processes that a loadtest command owns: started, watched, killed, stopped."""
