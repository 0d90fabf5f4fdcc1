"""Which backend is best: pure decisions on values, no I/O and no clock."""
