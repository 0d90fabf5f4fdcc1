"""A simulated vLLM: a pure model of continuous batching and prefix caching, and vLLM's HTTP surface on it."""

from loadtest.engine.config import EngineConfig
from loadtest.engine.scheduler import PRESETS, Limits, StepTime
from loadtest.engine.server import SimulatedEngine

__all__ = ["PRESETS", "EngineConfig", "Limits", "SimulatedEngine", "StepTime"]
