"""A real vLLM on the CPU: installing it, building small models for it, and running engines for tests and demos."""
