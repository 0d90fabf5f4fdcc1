"""An OpenAI-compatible gateway in front of vLLM backends."""

from pathlib import Path

from gateway.compiled import choose

__version__ = "0.1.0"
BUILD = choose(Path(__file__).parent)  # before any module of the gateway is imported
