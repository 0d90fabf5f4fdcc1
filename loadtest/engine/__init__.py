"""A simulated vLLM: a pure model of continuous batching and prefix caching, and vLLM's HTTP surface on it."""

from loadtest.engine.config import EngineConfig
from loadtest.engine.scheduler import Limits
from loadtest.engine.server import SimulatedEngine
from loadtest.engine.step_time import PRESETS, StepTime

__all__ = ["PRESETS", "EngineConfig", "Limits", "SimulatedEngine", "StepTime"]
