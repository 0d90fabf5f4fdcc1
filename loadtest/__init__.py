"""Load testing: a simulated vLLM, workloads, and the tools that drive and compare them."""
