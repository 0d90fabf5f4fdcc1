"""What the prefix report is made of: samples, tallies, and the search for what keeps caches cold."""
