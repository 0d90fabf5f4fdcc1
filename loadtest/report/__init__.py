"""What came of it: statistics, verdict, terminal, JSON and HTML."""
