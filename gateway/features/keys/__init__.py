"""API keys: which there are, what each may use, and what it used."""
