"""Sweeps: vLLM's settings one after another under the same load, and which of them serves best within its bounds."""
