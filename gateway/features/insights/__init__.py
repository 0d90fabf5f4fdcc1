"""What the prefix report is made of: samples, counts, and the search for what keeps caches cold."""
