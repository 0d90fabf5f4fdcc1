"""An OpenAI-compatible gateway in front of vLLM backends."""

__version__ = "0.1.0"
