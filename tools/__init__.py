"""Programs that write and build the documentation."""
