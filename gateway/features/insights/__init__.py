"""The prefix report: samples, counts, and the search for causes of cold caches."""
